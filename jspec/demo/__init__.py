"""A small published model and prompts for it, to see drafting at work without any set-up."""

from jspec._user_cache import cache_folder
from jspec.demo.assets import SMOLLM2, fetch_smollm2
from jspec.demo.prompts import Prompt, chat_prompts, copy_prompts, demo_prompts, humaneval_prompts

__all__ = [
    "SMOLLM2",
    "Prompt",
    "cache_folder",
    "chat_prompts",
    "copy_prompts",
    "demo_prompts",
    "fetch_smollm2",
    "humaneval_prompts",
]
