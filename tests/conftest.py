"""Settings for all tests: one thread, no network, no progress bars."""

import os

# Read once, when the libraries are first imported.
os.environ.update(
    OMP_NUM_THREADS="1",  # tests run side by side, and start processes of their own
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)

import datasets
import torch
from transformers.utils import logging

collect_ignore = ["proof"]  # a package of its own, whose suite runs where it is installed

torch.set_num_threads(1)
datasets.disable_progress_bars()
logging.disable_progress_bar()
