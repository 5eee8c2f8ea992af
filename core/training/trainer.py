"""`DraftTrainer`: transformers' Trainer, with a frozen target beside the model and a loss divided by global counts."""

import os
import warnings
from collections.abc import Mapping, Sequence, Sized
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput

from ..data import DraftCollator
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..files.reading import check_fields, read_config
from ..loss import estimated_tau
from ..target.cached import CachedTarget
from ..target.loading import place
from ..target.pairing import check_pair, remember, warn_of_other
from ..target.streaming import Shuffled
from ..target.target import Target
from .defaults import DraftTrainingArguments
from .progress import AsAskedNow, DraftPrinter, DraftProgress, ReadUpTo, SeedByEpoch, StopOnSignal, Stopwatch, TrainingStopped
from .ranks import Blankable, even_out, keep_batches_whole
from .ready import as_arrays, check_ready, check_rows
from .resume import alone_in, latest_complete
from .sharding import Borrow, local, shard, share_out_state, whole


class NonFiniteLoss(ForedraftError):
    """The loss became NaN or infinite; names the batch and the last good checkpoint."""


class DraftTrainer(Trainer):
    """Trains a draft of any adapter with the algorithm it was built for.

    `target` is the frozen model (or a `Target`); `train_dataset` and `eval_dataset` are packed rows (`foredraft.pack`). Logs the loss,
    the accuracy of every drafted position and the teacher-forced estimate of τ. Raises `NonFiniteLoss` before a
    non-finite gradient reaches a checkpoint. Weights below float32 are refused unless `half_weights`: there most updates round to
    nothing, which `bf16` avoids.
    """

    def __init__(
        self,
        model: BaseDraft,
        target: Target | PreTrainedModel,
        args: TrainingArguments | None = None,
        half_weights: bool = False,
        **kwargs: Any,
    ):
        args = args or DraftTrainingArguments()
        if not half_weights and (half := {p.dtype for p in model.parameters() if p.requires_grad and p.dtype.itemsize < 4}):
            raise ForedraftError(
                f"the draft's weights are {', '.join(map(str, half))}, where most updates round to nothing: train draft.float(), with "
                "bf16=True where products are to be fast; half_weights=True trains them as they are"
            )
        if args.n_gpu > 1:
            raise ForedraftError(
                f"{args.n_gpu} GPUs in one process: start one process per GPU, `torchrun --nproc-per-node {args.n_gpu} ...`"
            )
        if args.torch_compile or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
            raise ForedraftError(
                "torch_compile (or accelerate's dynamo_backend) compiles a model whole, which a draft cannot be: leave it out, and call "
                "draft.compile() (`compile: true` in a run), which compiles what lies between products"
            )
        keep_batches_whole(args)
        own = place(target.model if isinstance(target, Target) else target, args.device)  # before it is tried
        check_pair(own, model)
        self.target = target if isinstance(target, Target) else Target(own, model.config.aux_layers, model.algorithm.needs)
        for name in ("train_dataset", "eval_dataset"):
            check_rows(kwargs.get(name), model.config.vocab_size, name)
            kwargs |= {name: as_arrays(kwargs[name])} if name in kwargs else {}
        remember(model.config, self.target.model)
        self._sums: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}
        self._bad_rows: Tensor | None = None
        self._sharded = bool(args.fsdp)
        multiple = 128 if args.device.type == "cuda" else 1
        kwargs.setdefault("data_collator", DraftCollator(model.algorithm, args.seed, multiple))
        if isinstance(self.target, CachedTarget) and isinstance(kwargs["data_collator"], DraftCollator):
            kwargs["data_collator"].read_states = self.target.store.states
        super().__init__(model=model, args=args, **kwargs)
        if isinstance(self.target, CachedTarget):
            held_out = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
            sets = (rows for rows in (self.train_dataset, *held_out) if rows is not None)
            if self.target.store.streams:
                self.add_callback(ReadUpTo(self.target.store.directory, len(self.train_dataset), args.train_batch_size))
            self.target.fill(*sets, batch_size=args.per_device_train_batch_size, show_progress=not args.disable_tqdm)
        if self._sharded:
            shard(model, self.args.device, self.args.bf16)
            # Its wrapping for evaluation is autocast alone: no DDP around a model that shares itself out.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        # The loss divides by counts of the whole accumulated batch (see _get_num_items_in_batch), so Trainer must not divide again.
        self.model_accepts_loss_kwargs = True
        self._stop = StopOnSignal(self.accelerator)
        self.add_callback(SeedByEpoch)
        self.add_callback(Stopwatch)
        self.add_callback(AsAskedNow)
        self.add_callback(self._stop)
        self._borrow = Borrow(self.target.model, torch.bfloat16 if self.args.bf16 else None)
        self.add_callback(self._borrow)
        for theirs, ours in ((ProgressCallback, DraftProgress), (PrinterCallback, DraftPrinter)):
            if self.pop_callback(theirs):
                self.add_callback(ours)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As Trainer's; `resume_from_checkpoint=True` takes the newest *complete* checkpoint and says which it skipped.

        A checkpoint that has made all steps is loaded, and nothing trained. SIGTERM and Ctrl-C end with a checkpoint and
        `TrainingStopped`. Raises `ForedraftError` if another process trains into `output_dir`.
        """
        with alone_in(self.args.output_dir), self._stop.listening():
            if resume_from_checkpoint is True:
                newest = latest_complete(self.args.output_dir)
                resume_from_checkpoint = str(newest) if newest is not None else None
            if not resume_from_checkpoint:  # else the weights are the checkpoint's
                check_ready(self.model, self.target, self.train_dataset)
            else:
                made = check_fields(read_config(str(resume_from_checkpoint)), str(resume_from_checkpoint)).foredraft
                warn_of_other(made.target.model_dump(), self.target.model)
            if resume_from_checkpoint and self._has_made_all_steps(str(resume_from_checkpoint)):
                return TrainOutput(self.state.global_step, 0.0, {})
            self.data_collator.epoch = 0
            try:
                out = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            finally:
                self._borrow.give_back()
        if self._stop.agreed and self.state.global_step < self.state.max_steps:
            checkpoint = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
            raise TrainingStopped(self._stop.agreed, self.state.global_step, self.state.max_steps, checkpoint)
        return out

    def _has_made_all_steps(self, checkpoint: str) -> bool:
        """Then it is loaded, and said; Trainer would make one more."""
        state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        if not 0 < self.args.max_steps <= state.global_step:
            return False
        self._load_from_checkpoint(checkpoint)
        self.state = state
        print(f"'{checkpoint}' has made {state.global_step} of {self.args.max_steps} steps: nothing is left to train", flush=True)
        return True

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None) -> Any:
        """Capture the target, run the step inside the module's forward; gradients average over ranks, hence the factor."""
        counted = inputs if num_items_in_batch is None else {**inputs, "counts": num_items_in_batch}
        counted = {**counted, "progress": self.state.global_step / max(1, self.state.max_steps)}
        signal = self.target.capture(inputs)
        out = model(batch=counted, signal=signal)
        if self._sharded and not torch.is_grad_enabled():
            self.model.reshard()  # nobody else does, without a backward pass
        loss = out["loss"] * (self.accelerator.num_processes if model.training else 1)
        self._add("train" if model.training else "eval", out["metrics"])
        if model.training:
            self._watch(loss, inputs["row"])
        return (loss, out) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None) -> Any:
        """The loss alone; the metrics are summed aside."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's log, with accuracy per drafted position and estimated τ since the last one."""
        self._raise_if_bad()
        if "eval_loss" in logs:
            logs.update(self._read("eval", "eval_"))  # in place: `evaluate` returns them, and the best checkpoint is chosen by them
        elif "loss" in logs:
            logs.update(self._read("train", ""))
        super().log(logs, *args, **kwargs)

    def state_dict(self) -> dict[str, Tensor] | None:
        """The draft's weights to save, where they are shared out among ranks: whole, on the rank that saves. All ranks must ask.

        None where the draft's own are whole.
        """
        return whole(self.model.state_dict(), self.args.should_save) if self._sharded else None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; of a draft that is shared out among ranks the weights are gathered first."""
        if not self._sharded:
            super().save_model(output_dir, _internal_call)
            return
        state = self.state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, self._borrow.own(self.model.state_dict() if state_dict is None else state_dict))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; it loads what any number of ranks saved."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._sharded:
            optimizer.register_load_state_dict_pre_hook(share_out_state)
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = whole(self.optimizer.state_dict(), self.args.should_save)
        with patch.object(self.optimizer, "state_dict", lambda: state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with equally many rows for every rank."""
        ranks = self.accelerator.num_processes
        if ranks == 1 or not isinstance(dataset, Sized):
            return super()._get_dataloader(dataset, *args, **kwargs)
        return even_out(super()._get_dataloader(Blankable(dataset), *args, **kwargs), ranks)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.target, CachedTarget) and self.target.store.streams:
            return Shuffled(len(self.train_dataset), self.args.seed)
        return super()._get_train_sampler(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """Supervised slots per drafting step, over all micro-batches and ranks."""
        if not batch_samples:
            return None
        counts = torch.stack([batch["counts"] for batch in batch_samples]).sum(0).to(device)
        return self.accelerator.reduce(counts, "sum")

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Trainer reads config.json, to warn of other versions, as a bare PreTrainedConfig, which scaled RoPE breaks: here, as ours."""
        with patch("transformers.trainer.PreTrainedConfig", type(self.model.config)), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rope_scaling.*", category=FutureWarning)  # as in load_draft
            super()._load_from_checkpoint(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._raise_if_bad()
        finite = torch.stack([local(p).isfinite().all() for p in self.model.parameters()]).all()
        if not bool(self.accelerator.gather(finite).all()):
            raise self._non_finite(
                f"the weights are not finite at step {self.state.global_step}, though all losses were: a gradient overflowed"
            )
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save tells a full disk by a RuntimeError
            raise ForedraftError(
                f"could not write checkpoint-{self.state.global_step} in '{self.args.output_dir}' (disk full?): {error}\n"
                f"  Complete is: {latest_complete(self.args.output_dir) or 'none yet'}; make room, then resume"
            ) from error

    def _add(self, phase: str, metrics: Mapping[str, Tensor]) -> None:
        sums = self._sums[phase]
        for name, value in metrics.items():
            sums[name] = sums[name] + value if name in sums else value.detach().clone()

    def _read(self, phase: str, prefix: str) -> dict[str, float]:
        """The sums as rates, over all ranks; then start anew."""
        sums = {name: self.accelerator.reduce(value, "sum").tolist() for name, value in self._sums[phase].items()}
        self._sums[phase] = {}
        return {prefix + name: value for name, value in rates(sums).items()} if sums else {}

    def _watch(self, loss: Tensor, rows: Tensor) -> None:
        """Remember the first rows whose loss was not finite, without waiting for the device; look where looking is free."""
        rows = torch.where(torch.isfinite(loss.detach()), -1, rows)
        if self._bad_rows is not None:  # the last batch of an epoch may be shorter
            width = max(len(rows), len(self._bad_rows))
            rows, known = (F.pad(r, (0, width - len(r)), value=-1) for r in (rows, self._bad_rows))
            rows = torch.where((known >= 0).any(), known, rows)
        self._bad_rows = rows
        if loss.device.type == "cpu":
            self._raise_if_bad()

    def _raise_if_bad(self) -> None:
        if self._bad_rows is None or not bool((self._bad_rows >= 0).any()):
            return
        rows, self._bad_rows = self._bad_rows[self._bad_rows >= 0].tolist(), None
        raise self._non_finite(
            f"the loss is not finite after step {self.state.global_step}, in the batch of rows {rows} of the training data"
        )

    def _non_finite(self, what: str) -> NonFiniteLoss:
        return NonFiniteLoss(
            f"{what}.\n  Last good checkpoint: {latest_complete(self.args.output_dir) or 'none yet'}\n"
            "  Look at the rows; a lower learning_rate, max_grad_norm or bf16 instead of fp16 often helps; then resume"
        )


def rates(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Sums of `cross_entropy` as rates: `accuracy_1` .. `accuracy_K`, `cross_entropy`, `tau` (from α) and `tau_greedy`."""
    counts = [max(n, 1.0) for n in sums["count"]]
    accuracy = [c / n for c, n in zip(sums["correct"], counts, strict=True)]
    acceptance = [a / n for a, n in zip(sums["accepted"], counts, strict=True)]
    named = {f"accuracy_{k}": a for k, a in enumerate(accuracy, 1)}
    cross_entropy = sum(sums["cross_entropy"]) / sum(counts)
    return {**named, "cross_entropy": cross_entropy, "tau": estimated_tau(acceptance), "tau_greedy": estimated_tau(accuracy)}
