"""Hidden states on disk: what training reads of them, whose they are, and what becomes of them when something breaks."""

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import kill_at_random
from rigged import predictable_target, trainer_of, written_rows
from safetensors.torch import load_file
from tiny import TOKENS, chat, gradients, tiny_batch, tiny_draft, tiny_rows, tiny_target, tiny_tokenizer
from torch.testing import assert_close
from transformers import TrainerCallback

from foredraft import AlgorithmBase, DraftTrainer, ForedraftError, Target
from foredraft.registry import default_registry
from foredraft.target import store as stores
from foredraft.target.loading import load_target
from foredraft.target.streaming import Shuffled, place_of, stream
from foredraft.training import CachedTarget
from foredraft.training import run as runs
from foredraft.training.settings import RunConfig

MODEL = predictable_target(wobble=0.5)
ROWS = written_rows(MODEL)
LAYERS = (2, 4, 5)
PACKED = tiny_rows([["uuaaaauaaa", "ubbb", "uuu"], ["uuaaaauaaa", "uuaa", "aauub"], ["uaaaaaauubb"]])
"""Documents that end unsupervised, that have nothing to learn, that begin with an answer, padding."""

BY_DEFAULT = [
    name
    for name, cls in default_registry().algorithms().items()
    if issubclass(cls, AlgorithmBase) and not any(field.is_required() for field in cls.Options.model_fields.values())
]


def cached(directory: Path, model: Any = MODEL, layers: tuple[int, ...] = LAYERS, **settings: Any) -> CachedTarget:
    return CachedTarget(model, layers, directory, **settings)


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


class TestWhatTrainingReads:
    @pytest.mark.parametrize("algorithm", BY_DEFAULT)
    def test_loss_and_gradients_are_those_of_the_target_that_runs(self, algorithm: str, tmp_path: Path) -> None:
        small = {"num_layers": 1} if algorithm in ("dflash", "peagle") else {}
        draft = tiny_draft(MODEL, algorithm, **small)
        layers, needs = draft.config.aux_layers, draft.algorithm.needs
        batch, plain = tiny_batch(draft.algorithm, PACKED), Target(MODEL, layers, needs)
        target = cached(tmp_path, layers=layers, needs=needs)
        target.fill(PACKED, batch_size=len(PACKED))
        results = []
        for said in (plain.capture(batch), target.capture(batch), target.capture({**batch, "states": target.store.states(batch)})):
            torch.manual_seed(0)  # EAGLE-1 trains on states with noise
            step = draft.algorithm.loss(draft, batch, said)
            step.loss.backward()
            results.append((step.loss.detach(), gradients(draft)))
        for ours in results[1:]:
            assert_close(ours, results[0], rtol=1e-5, atol=1e-7)

    def test_only_what_is_read_is_there_and_nothing_twice(self, tmp_path: Path) -> None:
        target = cached(tmp_path)
        target.fill(PACKED)
        batch, store = tiny_batch(tiny_draft(MODEL).algorithm, PACKED), target.store
        wanted = store.wanted([PACKED])
        assert (wanted.documents, len(store.shards), wanted.missing) == (6, 6, 0)
        target.fill([*PACKED, *PACKED])
        states = store.states(batch)
        # Row 0: two documents, padding; aux states up to the token before the last supervised one, final ones before supervised tokens.
        assert (states["aux"][0].abs().sum(-1) > 0).int().tolist() == [1] * 9 + [0] + [1] * 3 + [0] * 6
        assert states["hidden"][0].isfinite().all(-1).int().tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, *[0] * 6]
        aux, final = 9 + 3 + 9 + 3 + 4 + 10, 7 + 3 + 7 + 2 + 2 + 8
        assert (wanted.tokens, wanted.size) == (aux, 4 * 32 * (3 * aux + final))
        assert 0 < sum(file.stat().st_size for file in shards(tmp_path)) - wanted.size < 2000, "headers and index"

    def test_aux_states_that_are_the_final_ones_are_kept_once(self, tmp_path: Path) -> None:
        layers = (MODEL.config.num_hidden_layers,)
        once = cached(tmp_path, layers=layers)
        once.fill(PACKED)
        assert (wanted := once.store.wanted([PACKED])).size == 4 * 32 * wanted.tokens
        assert cached(tmp_path / "final", layers=layers, needs=("final",)).store.form.widths == {"hidden": 32}

    @pytest.mark.parametrize(("kept", "near"), [("bfloat16", 4e-3), ("float8", 0.07)])
    def test_fewer_bytes(self, tmp_path: Path, kept: str, near: float) -> None:
        """Float8 keeps a scale per state, so that one large state costs the others nothing."""
        exact, rounded = cached(tmp_path / "exact"), cached(tmp_path / kept, kept=kept)
        batch = tiny_batch(tiny_draft(MODEL).algorithm, PACKED)
        for target in (exact, rounded):
            target.fill(PACKED)
        ours, theirs = (t.store.states(batch) for t in (rounded, exact))
        for name in ("aux", "hidden"):
            assert ours[name].dtype == torch.float32
            each, true = (s[name].unflatten(-1, (-1, 32)).nan_to_num() for s in (ours, theirs))
            assert_close(each, true, rtol=near, atol=near * float(true.abs().amax()) / 50)
            assert ((each - true).norm(dim=-1) <= near * true.norm(dim=-1)).all()
        assert rounded.store.wanted([PACKED]).size < {"bfloat16": 0.51, "float8": 0.4}[kept] * exact.store.wanted([PACKED]).size

    def test_trains_the_same(self, tmp_path: Path) -> None:
        """By the target, from states that are captured on the way, that are there, that are read by a worker, and with the layers gone."""

        def trained(name: str, target: Any, **fields: Any) -> Any:
            draft = tiny_draft(MODEL, ttt_steps=2)
            trainer = trainer_of(draft, target, tmp_path / name, ROWS, max_steps=4, **fields)
            if name == "released":
                target.release()
                assert target.layers[0].mlp.up_proj.weight.is_meta
            trainer.train()
            return draft.state_dict()

        layers = tiny_draft(MODEL).config.aux_layers
        plain = trained("plain", MODEL)
        for name, workers in (("captured", 0), ("read", 0), ("worker", 1), ("released", 0)):
            model = predictable_target(wobble=0.5) if name == "released" else MODEL
            weights = trained(name, cached(tmp_path / "states", model, layers), dataloader_num_workers=workers)
            assert_close(weights, plain, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("states")
    cached(directory, tokenizer=tiny_tokenizer()).fill(PACKED)
    return directory


class TestWhoseTheyAre:
    OTHERS: Mapping[str, Any] = {
        "dtype: float32 there, bfloat16 here": lambda to: cached(to, predictable_target(wobble=0.5).to(torch.bfloat16)),
        r"aux_layers: \[2, 4, 5\] there, \[1, 4, 5\] here": lambda to: cached(to, layers=(1, 4, 5)),
        "target: [0-9a-f]+ there, [0-9a-f]+ here": lambda to: cached(to, tiny_target(rms_norm_eps=1e-2)),
        r"weights, such as [\w.]+: \[.*\] there, \[.*\] here": lambda to: cached(to, tiny_target(seed=3)),
        "kept: float32 there, float8_e4m3fn here": lambda to: cached(to, kept="float8"),
        "template: [0-9a-f]+ there, [0-9a-f]+ here": lambda to: cached(to, tokenizer=tiny_tokenizer("{{ messages }}")),
    }

    @pytest.mark.parametrize("told", OTHERS)
    def test_anothers_are_refused_with_both_values(self, there: Path, told: str) -> None:
        with pytest.raises(ForedraftError, match=rf"(?s)another target's, or were kept otherwise:.*{told}"):
            self.OTHERS[told](there)

    def test_other_data_is_refused_and_a_part_of_it_is_not(self, there: Path) -> None:
        cached(there).fill(PACKED[1:])
        with pytest.raises(ForedraftError, match=r"other data: of 6 documents \(\w+\) there, of 7 \(\w+\) here, of which 1 are not"):
            cached(there).fill([*PACKED, *tiny_rows([["uaaauuu"]])])

    def test_of_those_that_keep_more_a_part_is_read(self, there: Path, tmp_path: Path) -> None:
        batch = tiny_batch(tiny_draft(MODEL).algorithm, PACKED)
        less = cached(there, needs=("aux",), tokenizer=tiny_tokenizer())
        less.fill(PACKED)
        assert_close(less.store.states(batch), {"aux": cached(there).store.states(batch)["aux"]})
        with pytest.raises(ForedraftError, match=r"keeps aux and final states, this run reads aux alone, and 1 documents are not stored"):
            less.fill(tiny_rows([["uaaauuu"]]))
        cached(tmp_path, needs=("aux",)).fill(PACKED)
        with pytest.raises(ForedraftError, match=r"needs: \['aux'\] there, \['aux', 'final'\] here"):
            cached(tmp_path)


class TestFaults:
    def test_states_that_are_not_finite_are_told_and_not_stored(self, tmp_path: Path) -> None:
        model = predictable_target(wobble=0.5)
        with torch.no_grad():
            model.get_input_embeddings().weight[PACKED[2]["input_ids"][3]] = float("nan")
        target = cached(tmp_path)
        target.model = model
        with pytest.raises(ForedraftError, match=r"aux states are not finite at token [0-3] of the document at 0 of row 2"):
            target.fill([PACKED[2]])
        assert not shards(tmp_path)

    def test_too_little_room_is_told_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(ForedraftError, match=r"has room for 0.0 MiB, and the hidden states take"):
            cached(tmp_path).fill(PACKED)
        assert "6 documents" in capsys.readouterr().out

    @pytest.mark.parametrize("damage", ["cut", "gone", "index"])
    def test_damage(self, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A shard that is cut or gone is told when it is read, and computed anew by the next capture; without the index nothing is."""
        monkeypatch.setattr(stores, "SHARD", 1)  # a document each
        batch = tiny_batch(tiny_draft(MODEL).algorithm, PACKED)
        cached(tmp_path).fill(PACKED)
        before = cached(tmp_path).capture(batch)
        first = shards(tmp_path)[0]
        if damage == "index":
            (tmp_path / "states.json").write_text('{"of": ')
            with pytest.raises(ForedraftError, match=r"the index '.*states.json' of stored hidden states is damaged"):
                cached(tmp_path)
            return
        if damage == "cut":
            os.truncate(first, first.stat().st_size - 5)
        else:
            first.unlink()
        with pytest.raises(ForedraftError, match=r"lacks a document|is damaged"):
            cached(tmp_path).capture(batch)
        target = cached(tmp_path)
        target.fill(PACKED)
        assert_close(target.capture(batch).hidden_BST, before.hidden_BST, equal_nan=True)
        assert len(shards(tmp_path)) == 6
        assert len(list(tmp_path.glob("*.damaged"))) == (damage == "cut")

    def test_ended_on_the_way_it_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was stored is not asked for again, and half a shard is removed."""
        monkeypatch.setattr(stores, "SHARD", 1)
        target, asked = cached(tmp_path), list[int]()

        def until(most: int) -> Any:
            def source(rows: Any, parts: Any) -> Any:
                for part, states in target.run(rows, parts):
                    if len(asked) == most:
                        raise KeyboardInterrupt
                    asked.append(len(part.ids))
                    yield part, states

            return source

        with pytest.raises(KeyboardInterrupt):
            target.store.fill([PACKED], until(3), show_progress=False)
        (tmp_path / "0-0.part").write_text("half")
        target.store.fill([PACKED], until(6), show_progress=False)
        assert (len(asked), len(shards(tmp_path)), list(tmp_path.glob("*.part"))) == (6, 6, [])

    @pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
    def test_killed_at_any_point_it_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
        """kill -9; what comes out in the end is what an uninterrupted capture stores."""
        monkeypatch.setattr(stores, "SHARD", 1)
        batch = tiny_batch(tiny_draft(MODEL).algorithm, ROWS)
        whole, killed = cached(tmp_path / "whole"), cached(tmp_path / "killed")
        whole.fill(ROWS, show_progress=False)

        def slowly(*asked: Any) -> Any:
            for found in killed.run(*asked):
                time.sleep(0.01)
                yield found

        def work() -> None:
            killed.store.fill([ROWS], slowly, batch_size=1, show_progress=False)

        for _ in kill_at_random(work, kills, 0.3):
            left = shards(tmp_path / "killed")
            if len(left) == len(ROWS):  # done: begin anew
                shutil.rmtree(tmp_path / "killed")
        work()
        assert not list((tmp_path / "killed").glob("*.part"))
        ours, theirs = (cached(tmp_path / d).store.states(batch) for d in ("killed", "whole"))
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)

    def test_a_full_disk_in_the_middle(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was written before stays, nothing half, and the next call goes on."""
        monkeypatch.setattr(stores, "SHARD", 1)
        target = cached(tmp_path)
        heard, tell = os.pipe()
        child = os.fork()
        if child == 0:  # the limit would stay with this process

            def full(*asked: Any) -> Any:
                for number, found in enumerate(target.run(*asked)):
                    if number == 3:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
                    yield found

            try:
                target.store.fill([PACKED], full, show_progress=False)
            except ForedraftError as error:
                os.write(tell, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert "could not keep hidden states" in os.read(heard, 1000).decode()
        assert len(shards(tmp_path)) == 3
        assert not list(tmp_path.glob("*.part"))
        target.fill(PACKED)
        assert len(shards(tmp_path)) == 6


class Beside:
    """Captures into a directory in another process, until it is ended."""

    ROOM = 2**15

    def __init__(self, directory: Path, rows: Any = ROWS):
        self.directory, self.rows, self.most = directory, rows, 0

    def __enter__(self) -> "Beside":
        self.start()
        return self

    def start(self) -> None:
        self.child = os.fork()
        if self.child == 0:
            try:
                torch.manual_seed(0)
                target = cached(self.directory, layers=tiny_draft(MODEL).config.aux_layers, streams=True)
                stream(target.store, self.rows, 42, self.ROOM, target.run, batch_size=2)
            finally:
                os._exit(0)

    def kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.waitpid(self.child, os.WNOHANG)
            self.kill()

    def note(self) -> None:
        sizes = [file.stat().st_size for file in shards(self.directory) if file.exists()]
        self.most = max(self.most, sum(sizes))


class TestStreaming:
    def trained(self, target: Any, out: Path, each: Any = None, resume: bool = False, **fields: Any) -> Any:
        class Noting(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if each:
                    each(state.global_step)

        draft = tiny_draft(MODEL, ttt_steps=2)
        trainer = trainer_of(draft, target, out, ROWS, **{"max_steps": 11, "per_device_train_batch_size": 1, **fields})
        trainer.add_callback(Noting())
        trainer.train(resume_from_checkpoint=resume)
        return draft.state_dict()

    def test_beside_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What another process captures, kills it and begins it anew on the way, trains as the target itself; little is ever on disk."""
        layers = tiny_draft(MODEL).config.aux_layers
        with monkeypatch.context() as online:
            online.setattr(DraftTrainer, "_get_train_sampler", lambda trainer, *_: Shuffled(len(ROWS), trainer.args.seed))
            plain = self.trained(MODEL, tmp_path / "plain")
        whole = cached(tmp_path / "whole", layers=layers)
        whole.fill(ROWS)
        with Beside(tmp_path / "states") as beside:

            def each(step: int) -> None:
                beside.note()
                if step in (2, 5):
                    beside.kill()
                    beside.start()

            weights = self.trained(cached(tmp_path / "states", layers=layers, streams=True), tmp_path / "streamed", each)
            os.waitpid(beside.child, 0)
        assert_close(weights, plain, rtol=1e-4, atol=1e-5)
        assert 0 < beside.most <= 1.5 * Beside.ROOM < sum(file.stat().st_size for file in shards(tmp_path / "whole"))
        assert not shards(tmp_path / "states")

    @pytest.mark.slow
    def test_training_that_goes_back(self, tmp_path: Path) -> None:
        """Stopped behind its last checkpoint, it needs states again that were removed: they are captured before those further on."""
        layers = tiny_draft(MODEL).config.aux_layers
        saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}

        def stop(step: int) -> None:
            if step == 5:
                raise KeyboardInterrupt

        weights = []
        with Beside(tmp_path / "states"):
            target = cached(tmp_path / "states", layers=layers, streams=True)
            with pytest.raises(KeyboardInterrupt):
                self.trained(target, tmp_path / "out", stop, **saving)
            weights.append(self.trained(target, tmp_path / "out", resume=True, **saving))
        with Beside(tmp_path / "others"):
            weights.append(self.trained(cached(tmp_path / "others", layers=layers, streams=True), tmp_path / "whole", **saving))
        assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)

    def test_nobody_captures(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores, "PATIENCE", 0.1)
        target = cached(tmp_path, streams=True)
        with pytest.raises(ForedraftError, match=r"nobody captures into .*: start `foredraft capture`"):
            target.capture(tiny_batch(tiny_draft(MODEL).algorithm, PACKED))

    @pytest.mark.parametrize(("step", "place"), [(0, 0), (2, 6), (3, 7), (4, 10), (7, 17)])
    def test_places(self, step: int, place: int) -> None:
        assert place_of(step, 7, 3) == place


def test_a_run_from_stored_states_leaves_the_layers_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draft as with the target; where all is stored its layers are not loaded, and only the start asks for the last of them."""
    tiny_target(vocab=TOKENS, eos_token_id=2, pad_token_id=0).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": chat(f"q {i}", f"the answer {i}")}) + "\n" for i in range(6)))
    training = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    data = {"train": str(tmp_path / "data.jsonl"), "held_out": 1, "max_length": 64}
    fields = {"target": str(tmp_path / "target"), "data": data, "options": {"ttt_steps": 2}, "training": training}
    loaded = []
    monkeypatch.setattr(runs, "load_target", lambda *a, **k: (loaded.append(m := load_target(*a, **k)), m)[1])
    drafts = []
    for name in ("plain", "captured", "stored"):
        kept = {} if name == "plain" else {"hidden_states_cache": str(tmp_path / "states")}
        drafts.append(load_file(runs.train(RunConfig.check({**fields, **kept, "output_dir": str(tmp_path / name)})) / "model.safetensors"))
    assert [hasattr(model, "hf_device_map") for model in loaded] == [False, False, True]
    assert {place for name, place in loaded[2].hf_device_map.items() if "layers" in name} == {"disk"}
    for other in drafts[1:]:
        assert_close(other, drafts[0], rtol=1e-4, atol=1e-5)
