"""A server that loads drafts with a layer per token."""

from typing import Any

from foredraft import EngineBase, hookimpl


class Server(EngineBase):
    name = "proof_server"
    summary = "serves drafts with a layer per token"

    def refuses(self, config: Any) -> str | None:
        architectures = config.get("architectures")
        named = str(architectures[0]) if isinstance(architectures, list) and architectures else "none"
        return None if "PerStep" in named else f"it loads PerStep drafts, this one's architecture is {named}"

    def arguments(self, config: Any, draft: str, target: str, num_tokens: int) -> list[str]:
        return ["proof-serve", target, "--draft", draft, "--tokens", str(num_tokens)]


@hookimpl
def foredraft_engines() -> list[type]:
    return [Server]
