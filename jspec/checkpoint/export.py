"""Writing of Hugging Face folders from params: the inverse of `assemble`."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoint import Model
from jspec.checkpoint.assemble import leaves_of, tensor_shape
from jspec.checkpoint.new_folder import new_folder
from jspec.checkpoint.safetensors import DTYPES
from jspec.models.layers import Place, Rules
from jspec.state import Params


class _Tensor(NamedTuple):
    """A checkpoint tensor as a part of a leaf of params."""

    place: Place
    leaf: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tensor_shape(self.leaf.shape, self.place)

    def read(self) -> np.ndarray:
        part = np.asarray(self.leaf)
        if self.place.columns:
            part = part[..., slice(*self.place.columns)]
        return np.ascontiguousarray(part.T if self.place.transpose else part)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    params: Params,
    rules: Rules,
    texts: Mapping[str, bytes],
    *,
    optional: Collection[str] = (),
) -> None:
    """Writes a Hugging Face folder atomically; tensors are copied one at a time.

    Args:
      folder: to be made.
      config: content of config.json.
      params: the weights.
      rules: as `assemble`; tensors without a place are left out.
      texts: further files by name.
      optional: keys of leaves that may be left out.

    Raises:
      OSError: `folder` exists, or a file cannot be written.
      ValueError: params lack a leaf of the rules, or have one that no rule names.
    """
    tensors = _find(params, rules, optional)
    with new_folder(folder) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        for name, text in texts.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(text)
        _write_safetensors(partial / "model.safetensors", tensors)


def tokenizer_files(model: Model, bos_id: int | None) -> dict[str, bytes]:
    """Makes the tokenizer files of transformers, with end token and chat template.

    Args:
      model: the model; without a tokenizer.json there are no files.
      bos_id: token that begins a text, None where there is none.

    Returns:
      The files' contents by name.
    """
    if model.tokenizer_json is None:
        return {}
    files = {"tokenizer.json": model.tokenizer_json}
    ends = [*model.config.eos_token_ids, *model.stop_ids]
    ids = {"bos_token": bos_id, "eos_token": ends[0] if ends else None}
    texts = _token_texts(model.tokenizer_json)
    special = {name: texts[token] for name, token in ids.items() if token in texts}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_positions,
        "clean_up_tokenization_spaces": False,
        **special,
        **(model.tokenizer_config or {}),
    }
    template = model.chat_template
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    elif template is not None:
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in template.items()
        ]
    files["tokenizer_config.json"] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    files["special_tokens_map.json"] = json.dumps(special, indent=2, ensure_ascii=False) + "\n"
    return {name: text.encode() for name, text in files.items()}


def _token_texts(tokenizer_json: str) -> dict[Any, str]:
    """Returns the text of each token by its id."""
    try:
        tokenizer = json.loads(tokenizer_json)
        vocab = tokenizer.get("model", {}).get("vocab", {})
        pairs = [(token, text) for text, token in vocab.items()] if isinstance(vocab, dict) else []
        pairs = pairs or [(token, text) for token, (text, _) in enumerate(vocab)]  # Unigram
        pairs += [(added["id"], added["content"]) for added in tokenizer.get("added_tokens", ())]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"tokenizer.json is no tokenizer ({error!r}). Fetch the file again."
        ) from error
    return dict(pairs)


def _find(params: Params, rules: Rules, optional: Collection[str] = ()) -> dict[str, _Tensor]:
    leaves = leaves_of(params)
    places = {name: place for name, place in rules.items() if place is not None}
    wanted = {place.path for place in places.values()}
    misfits = (wanted ^ leaves.keys()) - {(name,) for name in optional if (name,) not in wanted}
    if misfits:
        names = sorted("/".join(path) for path in misfits)
        raise ValueError(
            f"params and rules do not fit, they differ in {', '.join(names)}. Take both from one "
            "model."
        )
    return {name: _Tensor(place, leaves[place.path]) for name, place in places.items()}


def _write_safetensors(file: Path, tensors: Mapping[str, _Tensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.leaf.dtype)
        start, end = end, end + dtype.itemsize * int(np.prod(tensor.shape))
        header[name] = {
            "dtype": names[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(tensor.read().tobytes())
