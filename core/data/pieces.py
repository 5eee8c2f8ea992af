"""Where each message of a rendered conversation ends, of templates that are proven to write message after message."""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, nodes

from .skipped import Unusable

if TYPE_CHECKING:
    from .template import Template

MARK = "\x02message ends\x03"
_ENDFOR = re.compile(r"(\{%[-+]?)\s*endfor\b")
_BEFORE = ("first", "index", "index0", "previtem", "cycle")
"""What a loop says of an item without looking at those that follow."""


class Pieces:
    """A template in which every message's text follows from the messages up to it, and that of the end from none.

    The proof reads the template's syntax tree: one loop over `messages` at the top, which asks for no later message nor for how many there
    are; `messages` elsewhere as `messages[0]` alone; behind the loop nothing but what does not change with messages. A template
    that is written otherwise has no `marked` text, and is rendered prefix by prefix.
    """

    def __init__(self, template: "Template"):
        self.template = template
        self._same: set[Any] = set()

    @cached_property
    def marked(self) -> str | None:
        """The template with a mark behind each message; None without a proof."""
        source = self.template.tokenizer.chat_template
        if not isinstance(source, str):  # several, by use
            return None
        for end in _ENDFOR.finditer(source):
            marked = f"{source[: end.start()]}{end[1]} if true -%}}{MARK}{{%- endif -%}}{source[end.start() :]}"
            try:
                tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(marked)
            except TemplateError:  # such as tags of an extension
                return None
            loops = [node for node in tree.body if isinstance(node, nodes.For) and _is(node.iter, "messages")]
            if len(loops) == 1 and _is_mark(loops[0].body[-1]):
                return marked if _proven(tree, loops[0]) else None
        return None

    @cached_property
    def opening(self) -> str | None:
        """What asks for the assistant's turn, behind any messages; None if that cannot be told."""
        turns = [{"role": "user", "content": "a"}]
        try:
            plain, asked = (self.template.text(turns, prompt=prompt) for prompt in (False, True))
            _, *ends = self._cut(turns, None) or ("",)
        except Unusable:
            return None
        rest = plain[ends[-1] :] if ends else None
        return asked[ends[-1] :] if rest in ("", self.template.closing) else None

    def of(self, messages: Sequence[Any], tools: list[Any] | None) -> tuple[str, list[int]] | None:
        """The conversation's text, and where each message ends in it; None where only prefixes tell. Raises `Unusable`."""
        if self.marked is None or self.opening is None:
            return None
        found = self._cut(messages, tools)
        if found is None:
            return None
        text, *ends = found
        kind = tuple((m["role"], *sorted(m)) for m in messages[:8]), bool(tools)
        if kind not in self._same:  # the first of its kind is compared with the template as it stands
            if text != self.template.text(messages, tools):
                return None
            self._same.add(kind)
        return text, ends

    def _cut(self, messages: Sequence[Any], tools: list[Any] | None) -> tuple[str, *tuple[int, ...]] | None:
        parts = self.template.text(messages, tools, chat_template=self.marked).split(MARK)
        if len(parts) != len(messages) + 1:
            return None
        return "".join(parts), *accumulate(map(len, parts[:-1]))


def _proven(tree: nodes.Template, loop: nodes.For) -> bool:
    behind = tree.body[tree.body.index(loop) + 1 :]
    if loop.test or loop.recursive or loop.else_ or any(tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))):
        return False
    fixed = [node.node for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const) and node.arg.value == 0]
    asked = [node for node in tree.find_all(nodes.Name) if node.name == "messages" and node is not loop.iter]
    if any(not any(node is first for first in fixed) for node in asked):
        return False
    if any(node.name == "add_generation_prompt" for part in tree.body if part not in behind for node in part.find_all(nodes.Name)):
        return False
    own = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"} | {"messages", "tools", "loop"}
    for part in behind:
        if any(part.find_all((nodes.Call, nodes.For, nodes.Assign, nodes.AssignBlock))) or _names(part) & own:
            return False
    return all(map(_looks_back, loop.body))


def _looks_back(node: nodes.Node) -> bool:
    """Whether what a node asks of the loop it stands in is known before the next item."""
    if isinstance(node, nodes.For):
        return _looks_back(node.iter)  # inside, `loop` is another one
    if isinstance(node, nodes.Getattr) and _is(node.node, "loop"):
        return node.attr in _BEFORE
    return not _is(node, "loop") and all(map(_looks_back, node.iter_child_nodes()))


def _names(node: nodes.Node) -> set[str]:
    return {name.name for name in node.find_all(nodes.Name)} | ({node.name} if isinstance(node, nodes.Name) else set())


def _is(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_mark(node: nodes.Node) -> bool:
    return isinstance(node, nodes.If) and any(data.data == MARK for data in node.find_all(nodes.TemplateData))
