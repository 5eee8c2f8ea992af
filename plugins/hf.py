"""transformers: `target.generate` with the draft, in this process. Serves every draft of ours."""

from typing import Any

from foredraft import hookimpl
from foredraft.contracts.engine import Config, EngineBase


class Transformers(EngineBase):
    """`foredraft.generate`: the target as transformers runs it, the draft as it was trained."""

    name = "hf"
    summary = "transformers' own generate, by `foredraft generate`"

    def refuses(self, config: Config) -> str | None:
        """Only what is not in our format."""
        if "foredraft" in config:
            return None
        return "its config.json has no 'foredraft' entry: `foredraft import` makes a draft of ours of a peer's"

    def arguments(self, config: Config, draft: str, target: str, num_tokens: int) -> list[str]:
        """A prompt answered; there is no server."""
        return ["foredraft", "generate", "--target", target, "--draft", draft, "--num-draft-tokens", str(num_tokens), "PROMPT"]


@hookimpl
def foredraft_engines() -> list[type[Any]]:
    """The engine of this file."""
    return [Transformers]
