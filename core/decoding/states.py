"""What a target keeps of the text, and the way back from behind rejected tokens: rows are cut, states of fixed size put back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..errors import ForedraftError
from ..target.capture import home_of

CACHES = ("past_key_values", "cache_params", "state")
"""What families call their cache, among a model's arguments and outputs."""

MOST_REPLAYED = 16
"""Tokens by which states may lag behind the text: more of them are read again, fewer and a pass without a draft comes sooner."""

NO_CACHE = "it keeps no cache (use_cache=False?): drafted tokens are verified against the cache of the text before them"


def cache_of(named: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments or outputs; None if there is none."""
    return next((named[name] for name in CACHES if named.get(name) is not None), None)


def is_stateful(model: PreTrainedModel, cache: Any) -> bool:
    """Whether a part of what is kept of a text is of fixed size, written over by every token: what was there cannot be cut out again."""
    return bool(model._is_stateful or not model._supports_default_dynamic_cache() or not getattr(type(cache), "is_croppable", True))


class TextCache:
    """The target's cache, which holds the first `length` tokens of the text, and a way back to there from behind rejected ones.

    Keys and values are cut. Where a model has states of fixed size (linear attention, state spaces, compressors), all is copied before a
    pass, keys by reference; if a draft is not accepted whole it is put back as it was, and the next pass reads what was accepted again,
    before its own draft. So at the end of a text it may lag behind, too.
    """

    def __init__(self, model: PreTrainedModel, kwargs: Mapping[str, Any]):
        self.held, self.length = cache_of(kwargs), 0
        self.stateful = is_stateful(model, self.held)
        self._way = (way_of(model) if self.stateful else None) or Way()
        self._before: tuple[Any, list[dict[str, Tensor]]]
        if self.held is not None and not self.stateful:
            self.held.activate_past_recording()

    def before(self) -> None:
        """Called before a pass with drafted tokens."""
        if self.stateful:
            self._before = _copied(self.held), [{n: t.clone() for n, t in _own_states(m).items()} for m in self._way.holders]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While open, the model reads several tokens behind those held as it would in one go with them."""
        if not self.stateful:
            yield
            return
        with _counted(self.held), _in_turn(self._way.steps):
            yield

    def keep(self, outputs: Any, rows: Sequence[int], fed: int, count: int) -> None:
        """After a pass over `fed` tokens of the text and `count` drafted ones: of the latter's rows, and the newest token's, `rows` stay.

        Sliding windows, which keep more while they may have to go back, are cut to their length here.
        """
        found, given = cache_of(outputs), getattr(self.held, "layers", ())
        if found is None and any(getattr(layer, "is_initialized", False) for layer in given):
            found = self.held  # some write into the one that they were given, and do not hand it on
        self.held = found
        if self.held is None:
            raise ForedraftError(NO_CACHE)
        if not self.stateful:
            keep_rows(self.held, rows, 1 + count)
        elif len(rows) <= count:
            held, own = self._before
            _put_back(self.held, held)
            for module, kept in zip(self._way.holders, own, strict=True):
                vars(module).update(kept)
            return
        self.length += fed + len(rows) - 1


def keep_rows(cache: Cache, rows: Sequence[int], count: int) -> None:
    """Of the latest `count` rows in the cache keep these, ascending."""
    if list(rows) != list(range(len(rows))):
        past = cache.get_seq_length() - count
        for layer in cache.layers:
            for states in (layer.keys, layer.values):
                states[..., past : past + len(rows), :] = states[..., [past + row for row in rows], :]
    cache.crop(len(rows) - count)


def _copied(held: Any) -> Any:
    """A copy of a cache. Keys and values are shared with it: layers that may have other states replace theirs, and write into none."""
    layers = getattr(held, "layers", [])
    shared = [kept for layer in layers for kept in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    shared += [value for value in getattr(held, "__dict__", {}).values() if isinstance(value, torch.Stream)]
    return deepcopy(held, {id(kept): kept for kept in shared if kept is not None})


def _put_back(held: Any, before: Any) -> None:
    """The object that the target and the user know has the states of the copy."""
    if isinstance(held, list):
        held[:] = before
    else:
        vars(held).update(vars(before))


@contextmanager
def _counted(held: Any) -> Iterator[None]:
    """While open, layers of a cache that keep nothing in it count the text's tokens as others do: masks are made by what the first says."""
    layers = [layer for layer in getattr(held, "layers", ()) if isinstance(layer, DynamicLayer)]
    full = {type(layer): layer for layer in layers if layer.is_initialized}
    empty = [layer for layer in layers if not layer.is_initialized and type(layer) in full]
    asked = ("get_seq_length", "get_mask_sizes")
    for layer in empty:
        vars(layer).update({name: getattr(full[type(layer)], name) for name in asked})
    try:
        yield
    finally:
        for layer in empty:
            for name in asked:
                del vars(layer)[name]


@dataclass(frozen=True)
class Way:
    """How a model reads several tokens behind states of fixed size."""

    steps: tuple[nn.Module, ...] = ()
    """What has to read one token after another; the rest of its layers reads all at once."""
    holders: tuple[nn.Module, ...] = ()
    """What keeps a state in itself, not in the cache."""


_known: "WeakKeyDictionary[PreTrainedModel, Way | None]" = WeakKeyDictionary()


@torch.no_grad()
def way_of(model: PreTrainedModel) -> Way | None:
    """Asked of a model once, with eight tokens, that it should read in two parts as in one go; None if there is no way.

    Scans without an initial state, as Mamba-1's in transformers, and convolutions that forget theirs do not, unless token by token.
    """
    if model not in _known:
        ids_18 = torch.arange(8, device=home_of(model))[None] % model.config.get_text_config().vocab_size
        whole = model(input_ids=ids_18, use_cache=False).logits[0, 4:].float()
        parts, writers, holders = _watched(model, lambda: _in_parts(model, ids_18, ()))
        at_once, in_turn = _error(parts, whole), inf
        if at_once > 1e-3 and writers:  # rounding, or another text?
            in_turn = _error(_in_parts(model, ids_18, writers), whole)
        steps = writers if in_turn < at_once / 4 else ()
        _known[model] = Way(steps, holders) if min(at_once, in_turn) < 0.1 else None
    return _known[model]


def _error(parts: Tensor | None, whole: Tensor) -> float:
    return inf if parts is None else float((parts - whole).abs().amax() / whole.abs().amax())


def _in_parts(model: PreTrainedModel, ids_18: Tensor, steps: Sequence[nn.Module]) -> Tensor | None:
    """Logits [4, V] of the last four tokens, read behind the first four; None if the model says that it cannot."""
    named = {"past_key_values": DynamicCache(config=model.config.get_text_config())} if model._supports_default_dynamic_cache() else {}
    try:
        first = model(input_ids=ids_18[:, :4], use_cache=True, **named)
        named |= {name: first[name] for name in CACHES if first.get(name) is not None}
        if "position_ids" in signature(model.forward).parameters:  # some count from 0 unless told
            named["position_ids"] = torch.arange(4, 8, device=ids_18.device)[None]
        with _counted(cache_of(named)), _in_turn(steps):
            return model(input_ids=ids_18[:, 4:], use_cache=True, **named).logits[0].float()
    except (ValueError, RuntimeError):
        return None


def _watched(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """What a run gives; the modules that write states in it (the outermost ones, if they hold each other); those that keep their own."""
    running: list[nn.Module] = []
    found: list[nn.Module] = []
    write, before = Cache.update_recurrent_state, {m: _own_states(m) for m in model.modules()}

    def watched(*args: Any, **kwargs: Any) -> Any:
        found.append(running[-1])
        return write(*args, **kwargs)

    with ExitStack() as opened:
        for module in model.modules():
            opened.callback(module.register_forward_pre_hook(lambda m, given: running.append(m)).remove)
            opened.callback(module.register_forward_hook(lambda m, given, out: running.remove(m), always_call=True).remove)
        opened.callback(setattr, Cache, "update_recurrent_state", write)
        Cache.update_recurrent_state = watched
        out = run()
    holders = [m for m in model.modules() if {n: id(t) for n, t in _own_states(m).items()} != {n: id(t) for n, t in before[m].items()}]
    inside = {part for m in (*found, *holders) for part in m.modules() if part is not m}
    return out, tuple(dict.fromkeys(m for m in (*found, *holders) if m not in inside)), tuple(holders)


def _own_states(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a module keeps as neither parameters nor buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


@contextmanager
def _in_turn(modules: Sequence[nn.Module]) -> Iterator[None]:
    """While open, these modules read one token after another, whatever they are given at once."""
    with ExitStack() as opened:
        for module in modules:
            patched: dict[str, Any] = vars(module)
            own = patched.get("forward")  # accelerate's, of what is placed
            patched["forward"] = partial(_one_by_one, module.forward)
            opened.callback(patched.update, forward=own) if own is not None else opened.callback(patched.pop, "forward")
        yield


def _one_by_one(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """`forward` over states [1, S, ..] token by token: what is as long is cut, too, and what comes out first is put together again."""
    length = next(value.shape[1] for value in (*given, *named.values()) if isinstance(value, Tensor) and value.ndim == 3)

    def cut(value: Any, at: int) -> Any:
        return value[:, at : at + 1] if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length else value

    outs = [forward(*(cut(v, i) for v in given), **{n: cut(v, i) for n, v in named.items()}) for i in range(length)]
    if isinstance(outs[0], Tensor):
        return torch.cat(outs, dim=1)
    return torch.cat([out[0] for out in outs], dim=1), *outs[-1][1:]
