"""`FormatTests`: what every format must do, whoever writes it; see `docs/testing.md`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ..contracts.finding import Finding
from ..contracts.format import FormatBase
from ..errors import ForedraftError
from ..files.raw import Checkpoint
from ..files.spellings import TARGET_HEAD
from ..formats import import_draft
from ..formats.content import algorithm_of, recognise
from ..formats.exporting import write_as
from ..registry import DEFAULT_ALGORITHM
from .case import Case, likeliest, reduced
from .common import Conformance, gap, missing, registry_of, shipped
from .disk import loaded
from .engines import changed
from .tiny import tiny_config

Written = tuple[Mapping[str, Any], Mapping[str, Tensor]]


class FormatTests(Conformance):
    """Subclass it as `class TestMine(FormatTests)` and supply the fixture `form`; for one that is only read, `write` too."""

    @pytest.fixture
    def form(self) -> type[FormatBase]:
        """The format under test."""
        raise missing(self, "form", "the format under test, a class", "MyFormat")

    @pytest.fixture
    def algorithm(self) -> Any:
        """An algorithm whose drafts it expresses; by default foredraft's own default."""
        return shipped().algorithm(DEFAULT_ALGORITHM)

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The algorithm's options; by default none."""
        return {}

    def write(self, form: type[FormatBase], draft: Any, tensors: Mapping[str, Tensor]) -> Written:
        """`config.json` and tensors of a checkpoint in the format, from a draft of ours and its own tensors."""
        if not form.written():
            raise NotImplementedError(
                f"format '{form.name}' is only read: {type(self).__name__} must say what its files hold:\n\n"
                "    def write(self, form, draft, tensors):\n        return {'architectures': [...], ...}, {'their.name': tensor, ...}\n"
            )
        return form().write(draft, tensors, algorithm_of(tensors, self.registry(form)), 3)

    @pytest.fixture
    def case(self, algorithm: Any, options: dict[str, Any]) -> Case:
        """A tiny target, and a draft with random weights."""
        return Case.of(algorithm, options, tiny_config())

    @pytest.fixture
    def checkpoint(self, form: type[FormatBase], case: Case, tmp_path: Path) -> Checkpoint:
        """The draft in the format."""
        return self.written(form, case.draft, tmp_path / "theirs")

    def test_registers(self, form: type[FormatBase]) -> None:
        """The registry takes it, and says what it reads and by what it tells it."""
        assert registry_of(form).formats() == {form.name: form}
        assert form.summary, f"{form.__name__} needs a `summary`: `foredraft plugins` shows it"

    def test_recognises_its_own(self, form: type[FormatBase], case: Case, checkpoint: Checkpoint) -> None:
        """Its checkpoints are its own beside all of foredraft's formats, and those of these are not."""
        found = recognise(checkpoint.config, checkpoint.tensors, self.registry(form)).form.name
        assert found == form.name, f"what '{form.name}' writes is taken for '{found}': recognises() or `priority` must tell them apart"
        tensors = own_tensors(case.draft)
        for other in (cls for cls in shipped().formats().values() if cls is not form and cls.written()):
            if other().refuses(case.draft.config.to_dict()):
                continue
            try:
                config, names = other().write(case.draft, tensors, algorithm_of(tensors, shipped()), 3)
            except ForedraftError:  # it has no such drafts
                continue
            try:
                found = recognise(config, names, self.registry(form)).form.name
            except ForedraftError:  # its names are not what it takes them for
                found = form.name
            assert found == other.name, f"what '{other.name}' writes is taken for '{found}': recognises() claims too much"

    @pytest.mark.parametrize(("size", "dtype"), [(None, torch.float32), (30, torch.bfloat16)], ids=["whole", "reduced-bfloat16"])
    def test_round_trip(self, form: type[FormatBase], case: Case, size: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
        """Written and read again: every tensor bit for bit, and a draft that computes the same."""
        case = reduced(case, size) if size else case
        if form.written() and (reasons := form().refuses(case.draft.config.to_dict())):
            pytest.skip(reasons[0])
        case.draft.to(dtype)
        before = {name: tensor.clone() for name, tensor in case.draft.state_dict().items()}
        self.written(form, case.draft, tmp_path / "theirs")
        case.model.save_pretrained(tmp_path / "target")
        read = import_draft(
            tmp_path / f"theirs{form.suffix}", tmp_path / "ours", str(tmp_path / "target"), self.registry(form, type(case.method))
        )
        assert read.form == form.name
        again = loaded(tmp_path / "ours", self.registry(form, type(case.method)))
        again.take_head(case.model) if not again.complete else None
        after = again.state_dict()
        lost = sorted(before.keys() ^ after.keys())
        assert not lost, f"written and read again, {', '.join(lost)} came or went: does rename() undo what write() does to names?"
        others = [n for n in before if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])]
        assert not others, f"written and read again, {', '.join(others)} are not what they were, bit for bit"
        touched = [n for n, tensor in case.draft.state_dict().items() if not torch.equal(tensor, before[n])]
        assert not touched, f"write() has changed {', '.join(touched)} of the draft it was given: work on copies"
        ours, theirs = (drafted(Case(case.model, draft)) for draft in (case.draft, again))
        assert gap(theirs, ours) == 0, (
            "the weights are the same, but the draft proposes from other logits: a field that decides what it computes is lost. "
            "Does flatten() give back all that write() puts into config.json?"
        )

    def test_odd_configs(self, form: type[FormatBase], checkpoint: Checkpoint) -> None:
        """Whatever stands in a field of what it recognises, nothing but `ForedraftError` is raised."""
        subject = form()
        for name, value, config in changed(checkpoint.config):
            try:
                if subject.recognises(checkpoint.tensors, config):  # else it is asked nothing
                    subject.notes(config)
                    subject.algorithm(config)
                    subject.flatten(config)
            except ForedraftError:
                continue
            except Exception as error:
                raise AssertionError(f"{name} = {value!r} raises {type(error).__name__}: {error}. Check types before use") from error

    def test_findings(self, form: type[FormatBase], checkpoint: Checkpoint) -> None:
        """A sound checkpoint has none."""
        found: list[Finding] = form().findings(checkpoint)
        assert not found, f"findings() says of a checkpoint that is as it should be: {'; '.join(f.found for f in found)}"

    def registry(self, *classes: Any) -> Any:
        """The format under test among foredraft's own plugins."""
        ours = [r.cls for r in shipped().registered]
        return registry_of(*ours, *(cls for cls in classes if cls not in ours))

    def written(self, form: type[FormatBase], draft: Any, directory: Path) -> Checkpoint:
        """The draft in the format, on disk."""
        config, tensors = self.write(form, draft, own_tensors(draft))
        place = directory.with_name(directory.name + form.suffix)
        write_as(form(), place, config, tensors)
        return Checkpoint.open(place, self.registry(form))


@torch.no_grad()
def drafted(case: Case) -> Tensor:
    """The logits that two tokens are drafted from, after a text."""
    ids, aux = case.read("uuaaaaaaaa")
    return torch.stack(likeliest(case.method.drafter(case.draft), case.draft, ids, aux[:, :-1].to(case.draft.dtype), 2)[1])


def own_tensors(draft: Any) -> dict[str, Tensor]:
    """What a draft's file holds."""
    left_out = TARGET_HEAD if draft.config.spec.target_head else ()
    return {name: tensor for name, tensor in draft.state_dict().items() if name not in left_out}
