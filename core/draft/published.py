"""What a draft has of a model of transformers' that others ask for: saving, the hub, and no generation of its own."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ForedraftError
from ..files.card import CARD
from ..files.ours import save_draft


class NoAssistant(ForedraftError, AttributeError):
    """A draft was given to transformers' `generate` as if it were a language model."""


class Published(PreTrainedModel):
    """The part of `BaseDraft` that answers transformers and the hub."""

    algorithm: Any
    wiring: Any
    embed_tokens: Any

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: bool | str | None = None, **commit: Any) -> str:
        """Upload the draft as `save_draft` writes it, its model card included unless the repository has one; the commit's address.

        `commit`: `revision`, `commit_message`, `commit_description`, `create_pr` of huggingface_hub's `upload_folder`.
        """
        from huggingface_hub import HfApi

        draft: Any = self
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        kept = [CARD] if api.file_exists(repo_id, CARD, revision=commit.get("revision")) else []
        commit.setdefault("commit_message", "Upload draft")
        with TemporaryDirectory() as folder:
            return str(api.upload_folder(repo_id=repo_id, folder_path=save_draft(draft, folder), ignore_patterns=kept, **commit))

    def save_pretrained(
        self, save_directory: str | Path, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """As ever, with the tensors that engines read (`Wiring.saved`)."""
        state = dict(state_dict if state_dict is not None else self.state_dict())
        if self.embed_tokens.weight.requires_grad:
            self.config.update({"foredraft": {**self.config.foredraft, "own_embedding": True}})
        super().save_pretrained(save_directory, *args, state_dict=self.wiring.saved(self, state), **kwargs)
