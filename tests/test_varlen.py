"""Varlen attention: every kernel, what those for CUDA are given, and the joint softmax against scores spelt out, in float64."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import gradients, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.testing import assert_close

from foredraft import DraftCollator, ForedraftError
from foredraft.data.collate import Segments, inputs_segments, packed_segments, slots_segments
from foredraft.draft.attention import Unrolled, kernel_for, kernels, unrolled_segments
from foredraft.draft.attention import unrolled as merging
from foredraft.draft.attention.unrolled import varlen, varlen_backward

SCALE = 0.3
HEADS = {"grouped 4/2": (4, 2), "one for all": (4, 1), "as many": (3, 3)}
# Per row: a lower-case letter is an input, an upper-case one a slot; a document is a run of one letter, dots are padding.
BATCHES = {
    "documents, gaps, padding": ["aaAAAaaAAabbBBbbbcccdDd...", "aaaaaaaaaaaaAAAAAAAAAAAAAA"],
    "slots from first to last": ["AAAABBBC"],
    "nothing asked of a row": ["aaaabbbb", "aaaAbbb."],
    "one slot": ["aA", "aa"],
}


def read(rows: list[str]) -> tuple[Tensor, Tensor]:
    """Documents [B, S], and slots [B, Q] padded as a plan pads them."""
    documents = torch.tensor([[-1 if letter == "." else ord(letter.lower()) for letter in row] for row in rows])
    slots = [[i for i, letter in enumerate(row) if letter.isupper()] for row in rows]
    width = max(map(len, slots))
    return documents, torch.tensor([s + [0] * (width - len(s)) for s in slots])


class Emulated:
    """The kernels that need CUDA, as far as their callers can tell: they check what they are given, and compute in float64."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def checked(self, name: str, rows: list[Tensor], keys: list[Tensor], cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Any:
        """What a real kernel would read past the end, hang on or silently get wrong."""
        self.calls.append(name)
        assert {x.ndim for x in (*rows, *keys)} == {3}
        assert all(x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and x.stride(-1) == 1 for x in (*rows, *keys))
        for cu, longest, among in ((cu_q, max_q, rows), (cu_k, max_k, keys)):
            assert cu.dtype == torch.int32
            assert cu.is_contiguous()
            assert int(cu[0]) == 0
            assert {len(x) for x in among} == {int(cu[-1])}
            assert int(cu.diff().min()) >= 1
            assert 2 <= int(cu.diff().max().clamp(min=2)) == longest
        assert (cu_q.diff() <= cu_k.diff()).all()  # a query without keys has no softmax
        return kernels.Bounds(cu_q, cu_k, max_q, max_k)

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        *bounds, dropout, causal, debug = rest
        assert (dropout, causal, debug) == (0.0, True, False)
        out, lse = kernels.Eager.forward(q, k, v, self.checked("forward", [q], [k, v], *bounds), scale)
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        *bounds, dropout, causal, state, _ = rest
        assert (dropout, causal, state.dtype) == (0.0, True, torch.uint64)
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        return kernels.Eager.backward(grad, q, k, v, out, lse, self.checked("backward", [q, grad, out], [k, v], *bounds), scale)

    def package(self) -> ModuleType:
        """`flash_attn.flash_attn_interface`."""

        def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, None, None]:
            *bounds, dropout_p, softmax_scale, causal = rest
            assert (dropout_p, causal) == (0.0, True)
            out, lse, *_ = self._flash_attention_forward(q, k, v, *bounds, 0.0, True, False, scale=softmax_scale)
            return out, lse, None, None

        def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> None:
            dq, dk, dv, *bounds, dropout_p, softmax_scale, causal, left, right, softcap, alibi, deterministic = rest
            assert (dropout_p, causal, left, right, softcap, alibi, deterministic) == (0.0, True, -1, -1, 0.0, None, False)
            state = torch.zeros(2, dtype=torch.uint64)
            found = self._flash_attention_backward(dout, q, k, v, out, lse, *bounds, 0.0, True, state, None, scale=softmax_scale)
            for target, value in zip((dq, dk, dv), found, strict=True):
                assert target.is_contiguous()
                target.copy_(value)

        module = ModuleType("flash_attn.flash_attn_interface")
        module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = forward, backward  # type: ignore[attr-defined]
        return module


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel's name; those for CUDA are emulated, those that spell scores out do it for few queries at a time."""
    monkeypatch.setattr(kernels, "CHUNK", 3)
    name, emulated = str(request.param), Emulated()
    if name == "flash":
        monkeypatch.setattr(kernels, "aten", emulated)
    if name == "flash-attn":
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", emulated.package())
    if name == "flex":
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # the CPU has no kernels for its way back
    monkeypatch.setattr(merging, "kernel_for", lambda *_: name)
    return name


behind_the_operator = pytest.mark.parametrize("kernel", sorted(kernels.KERNELS), indirect=True)
every_kernel = pytest.mark.parametrize("kernel", [*sorted(kernels.KERNELS), "flex"], indirect=True)


def inputs(documents: Tensor, slots: Tensor, steps: int, heads: str, dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, then keys and values of `steps` own entries behind the first; [B, H, n, d], laid out as attention gets them."""
    torch.manual_seed(steps)
    wide, narrow = HEADS[heads]
    lengths = [documents.shape[1]] + [slots.shape[1]] * steps
    made = [
        torch.randn(len(slots), n, h, dim, dtype=dtype) for n, h in [(slots.shape[1], wide), *[(n, narrow) for n in [*lengths, *lengths]]]
    ]
    for b, row in enumerate(slots.tolist()):
        for n, slot in enumerate(row):
            made[0][b, n] = made[0][b, row.index(slot)]  # padding is like the slot that it repeats
    return [x.transpose(1, 2).requires_grad_() for x in made]


def padding_of(slots: Tensor) -> Tensor:
    """[B, 1, Q, 1], True where a slot repeats one before it."""
    return torch.tensor([[slot in row[:n] for n, slot in enumerate(row)] for row in slots.tolist()])[:, None, :, None]


def spelt_out(pattern: Unrolled, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over all keys side by side, where the pattern says that they are seen."""
    rows = pattern.slots if len(keys) == 1 else None
    visible = pattern.visible(len(q), q.shape[2], [k.shape[2] for k in keys], rows)
    k, v = (torch.cat(x, dim=2).repeat_interleave(q.shape[1] // keys[0].shape[1], dim=1) for x in (keys, values))
    return (q @ k.mT * SCALE).masked_fill(~visible[:, None], float("-inf")).softmax(-1) @ v


def outcome(attend: Callable[..., Tensor], tensors: list[Tensor], padding: Tensor) -> list[Tensor]:
    """The output and every gradient; padding is not learned from."""
    out, half = None, len(tensors) // 2
    out = attend(tensors[0], tensors[1 : half + 1], tensors[half + 1 :])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out).masked_fill(padding, 0)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@every_kernel
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [*((r, "grouped 4/2", 5) for r in BATCHES), *((next(iter(BATCHES)), h, 8) for h in HEADS)]
)
def test_joint_softmax(kernel: str, rows: str, heads: str, dim: int, steps: int) -> None:
    documents, slots = read(BATCHES[rows])
    tensors, pattern = inputs(documents, slots, steps, heads, dim), Unrolled(documents, slots)
    ours = outcome(lambda *x: pattern.attend(*x, SCALE, slots if steps == 0 else None), tensors, padding_of(slots))
    assert_close(ours, outcome(lambda *x: spelt_out(pattern, *x), tensors, padding_of(slots)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kernel", ["flash", "flash-cpu"], indirect=True)
def test_a_backward_that_is_not_told_of_the_merge_is_caught(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known wrong one: the kernel's own output and log-sum-exp, and nothing of how the log-sum-exp weighs the entries merged."""
    documents, slots = read(BATCHES["documents, gaps, padding"])
    tensors, pattern = inputs(documents, slots, 2, "grouped 4/2", 8), Unrolled(documents, slots)
    expected = outcome(lambda *x: spelt_out(pattern, *x), tensors, padding_of(slots))

    def unmerged(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
        out, own = varlen(q, k, v, *rest)
        return varlen_backward(grad * (own - lse).exp().nan_to_num(0).T[..., None], q, k, v, out, own, *rest)

    monkeypatch.setattr(merging, "varlen_backward", unmerged)
    out, dq, dk, *_ = outcome(lambda *x: pattern.attend(*x, SCALE), tensors, padding_of(slots))
    assert_close(out, expected[0])
    assert (dq - expected[1]).abs().max() > 1e-2
    assert (dk - expected[2]).abs().max() > 1e-2


@behind_the_operator
@pytest.mark.parametrize("whole", [False, True])
def test_operator(kernel: str, whole: bool) -> None:
    """Its fake implementation, schema and compiled form agree with it; so do all kernels, forward and backward."""
    documents, slots = read(BATCHES["documents, gaps, padding"])
    found = inputs_segments(documents) if whole else packed_segments(documents, slots)
    bounds = (found["cu_q"], found["cu_k"], found["max_q"], found["max_k"])
    torch.manual_seed(0)
    q, grad = torch.randn(2, int(bounds[0][-1]), 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, documents.numel(), 2, 8, dtype=torch.float64)
    out, lse = varlen(q, k, v, *bounds, SCALE, kernel)
    merged = lse + torch.rand_like(lse)
    checked = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(varlen, (q, k, v, *bounds, SCALE, kernel), test_utils=checked)
    torch.library.opcheck(varlen_backward, (grad, q, k, v, out, merged, *bounds, SCALE, kernel), test_utils=checked)
    assert_close((out, lse), varlen(q, k, v, *bounds, SCALE, "eager"))
    ours, eager = (varlen_backward(grad, q, k, v, out, merged, *bounds, SCALE, name) for name in (kernel, "eager"))
    assert_close(ours, eager)


def test_compiles_whole() -> None:
    documents, slots = read(BATCHES["documents, gaps, padding"])
    tensors = inputs(documents, slots, 2, "grouped 4/2", 8)
    pattern = Unrolled(documents, slots, segments=unrolled_segments(documents, slots))
    compiled = torch.compile(pattern.attend, backend="aot_eager", fullgraph=True)
    plain, whole = (outcome(lambda *x, f=f: f(*x, SCALE), tensors, padding_of(slots)) for f in (pattern.attend, compiled))
    assert_close(whole, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["eager", "flash-cpu"], indirect=True)
def test_half_precision_is_near(kernel: str, dtype: torch.dtype) -> None:
    documents, slots = read(BATCHES["documents, gaps, padding"])
    tensors, pattern = inputs(documents, slots, 3, "grouped 4/2", 16), Unrolled(documents, slots)
    half = [x.detach().to(dtype).requires_grad_() for x in tensors]
    ours = outcome(lambda *x: pattern.attend(*x, SCALE), half, padding_of(slots))
    assert {x.dtype for x in ours} == {dtype}
    expected = outcome(lambda *x: pattern.attend(*x, SCALE), tensors, padding_of(slots))
    assert_close([x.double() for x in ours], expected, rtol=0.05, atol=0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize("algorithm", ["eagle3", "peagle"])
def test_padding_to_a_multiple_changes_nothing(algorithm: str) -> None:
    """As for GPUs, which like few widths: slots padded to 16 give the loss and the gradients of slots padded to the longest row."""
    model = tiny_target()
    draft, found = tiny_draft(model, algorithm, num_layers=2), []
    for multiple in (1, 16):
        batch = DraftCollator(draft.algorithm, multiple=multiple)(tiny_rows([["uaaaaauaa", "uaaa"], ["uuaaaaaaaa"]]))
        width = batch["slots" if algorithm == "eagle3" else "supervised"].shape[1]
        assert (width % 16 == 0) == (multiple == 16)
        draft.zero_grad()
        loss = draft(batch, tiny_signal(model, draft, batch))["loss"]
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(draft)})
    assert_close(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 192, 256, 20])
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", ["flash", "flash-attn", "flex", "eager"])
def test_on_cuda(name: str, rows: str, dim: int) -> None:
    """Real kernels, in bfloat16 and of the same numbers in float64 by the readable one: gaps, rows in vain, grouped heads."""
    if name == "flash-attn":
        pytest.importorskip("flash_attn")
    documents, slots = read([row * 40 for row in BATCHES[rows]])
    tensors = [(x.detach() * 0.3).bfloat16() for x in inputs(documents, slots, 2, "grouped 4/2", dim)]
    pattern = Unrolled(documents.cuda(), slots.cuda(), name)
    ours = outcome(lambda *x: pattern.attend(*x, SCALE), [x.cuda().requires_grad_() for x in tensors], padding_of(slots).cuda())
    exact = Unrolled(documents, slots, "eager")
    expected = outcome(lambda *x: exact.attend(*x, SCALE), [x.double().requires_grad_() for x in tensors], padding_of(slots))
    for i, (mine, right) in enumerate(zip(ours, expected, strict=True)):
        error = (mine.cpu().double() - right).norm() / right.norm()
        assert error < 0.02, f"tensor {i}: relative error {error:.3f}"


class TestSegments:
    @pytest.mark.parametrize("rows", BATCHES)
    def test_queries_stand_on_their_own_keys(self, rows: str) -> None:
        """Each slot's row sees its document up to itself. Only where segments stand one after the other is a row in vain."""
        documents, slots = read(BATCHES[rows])
        every = torch.arange(documents.shape[1]).expand(len(documents), -1)
        packed, alone = packed_segments(documents, slots), slots_segments(documents, slots)
        for found, wanted in ((packed, slots), (alone, slots), (inputs_segments(documents), every)):
            for slot, seen in zip(wanted.flatten().tolist(), self.seen(found, wanted), strict=True):
                b = seen[0] // documents.shape[1]
                assert seen == [b * documents.shape[1] + s for s in range(slot + 1) if documents[b, s] == documents[b, slot]], (
                    f"slot {slot} of row {b}"
                )
        assert alone["asked"] is None
        assert int(alone["cu_q"][-1]) == (~padding_of(slots)).sum()
        assert int(packed["cu_k"][-1]) == documents.numel()

    @staticmethod
    def seen(found: Segments, wanted: Tensor) -> list[list[int]]:
        place = list(range(wanted.numel())) if found["place"] is None else found["place"].tolist()
        spans, keys = kernels.Bounds(found["cu_q"], found["cu_k"], 0, 0).spans(), {}
        for q, q_end, k, k_end in spans:
            keys |= {row: list(range(k, k_end - (q_end - 1 - row))) for row in range(q, q_end)}
        return [keys[row] for row in place]


class TestChoice:
    def test_by_device_dtype_and_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert [kernel_for(cpu, torch.float32, 999, asked) for asked in ("auto", "flash", "eager")] == ["flash-cpu", "flash-cpu", "eager"]
        assert kernel_for(cuda, half, 192) == kernel_for(cuda, half, 192, "flash") == "flash"
        assert kernel_for(cuda, torch.float32, 64) == kernel_for(cuda, half, 64, "flex") == "flex"
        assert {kernel_for(cuda, torch.float32, 8), kernel_for(cuda, half, 512), kernel_for(cuda, half, 64, "eager")} == {"eager"}
        with monkeypatch.context() as patch:  # a card of less shared memory
            patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
            assert [kernel_for(cuda, torch.float32, width) for width in (64, 128)] == ["flex", "eager"]
            assert [kernels.ranged_kernel(cuda, half, width) for width in (128, 192)] == ["flex", "dense"]
        with monkeypatch.context() as patch:  # FlexAttention runs compiled alone
            patch.setenv("TORCH_COMPILE_DISABLE", "1")
            assert kernel_for(cuda, torch.float32, 64) == "eager"
            with pytest.raises(ForedraftError, match="'flex' wants TORCH_COMPILE_DISABLE unset; found"):
                kernel_for(cuda, half, 64, "flex")
        monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name == "flash_attn" else None)
        assert kernel_for(cuda, half, 64, "flash-attn") == "flash-attn"
        assert kernel_for(cuda, torch.float32, 64) == "eager"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert kernel_for(cuda, half, 64) == "eager"

    def test_a_draft_names_it(self) -> None:
        """The one that was asked for; nothing where there is no attention."""
        draft = tiny_draft(tiny_target())
        assert draft.attention_kernel(torch.device("cpu"), torch.float32).startswith("flash-cpu, ")
        draft.kernel = "eager"
        assert draft.attention_kernel(torch.device("cpu"), torch.bfloat16).startswith("eager, ")
        assert tiny_draft(tiny_target(), "medusa").attention_kernel(torch.device("cpu"), torch.float32) == ""

    @pytest.mark.parametrize("algorithm", ["peagle", "dflash"])
    def test_of_ranges(self, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        narrow = tiny_draft(tiny_target(), algorithm)  # heads of 8
        assert narrow.attention_kernel(torch.device("cuda"), torch.bfloat16).startswith("dense, ")
        draft = tiny_draft(tiny_target(hidden=64), algorithm)
        named = [draft.attention_kernel(torch.device(device), torch.bfloat16).split(",")[0] for device in ("cuda", "cpu")]
        assert named == ["flex", "dense"]
        draft.kernel = "flex"
        with pytest.raises(ForedraftError, match="wants a CUDA device; found"):
            draft.attention_kernel(torch.device("cpu"), torch.float32)
        draft.kernel = "flash-attn"
        with pytest.raises(ForedraftError, match="attention kernel 'flash-attn': this draft's queries see ranges of keys"):
            draft.attention_kernel(torch.device("cuda"), torch.bfloat16)

    @pytest.mark.parametrize(
        ("device", "dtype", "head_dim", "asked", "said"),
        [
            ("cpu", torch.bfloat16, 64, "flash-attn", "wants a CUDA device, the package: pip install 'foredraft"),
            (
                "cuda",
                torch.float32,
                512,
                "flash",
                "wants bfloat16 or float16, heads of 256 at most, compute capability 8.0 or above; found",
            ),
            ("cuda", torch.float32, 8, "flex", "wants heads of 16 to 64, compute capability 8.0 or above; found"),
            ("cpu", torch.float32, 64, "fast", "unknown attention kernel 'fast': choose auto, flash"),
        ],
    )
    def test_what_is_missing_is_said(
        self, device: str, dtype: torch.dtype, head_dim: int, asked: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        with pytest.raises(ForedraftError, match=said.replace("'", ".")):
            kernel_for(torch.device(device), dtype, head_dim, asked)
