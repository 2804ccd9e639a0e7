"""Makes another folder of recordings: `python -m tests.other_recordings DIR`, to try the tests on.

It has the format of `tests/golden`, with fewer cases in another order under other names, index ops
whose cases come from the plain loops, models under other names with fewer prompts, and no file of
two families. `JSPEC_GOLDEN=DIR make test-golden` has to pass on it.
"""

import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from tests.support.oracles import ops

SOURCE = Path(__file__).parent / "golden"
LEFT_OUT = ("parse_output.json", "update_num_computed_tokens.npz")
RENAMED = {"target_llama": "alpha", "eagle3_llama": "beta", "e2e_llama_eagle3": "gamma"}


def write(folder: Path, seed: int = 0) -> None:
    """Writes a folder of recordings."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(SOURCE.iterdir()):
        if path.name in LEFT_OUT or path.is_dir():
            continue
        target = folder / path.name
        if path.suffix == ".npz":
            names, scalars, cases = read_family(path)
            kept = rng.permutation(len(names))[: -(-len(names) // 2)]
            more = BY_LOOPS.get(path.stem, lambda rng: [])(rng)
            write_family(
                target,
                [f"again {i}" for i in range(len(kept) + len(more))],
                [scalars[i] for i in kept] + [scalar for scalar, _ in more],
                [cases[i] for i in kept] + [arrays for _, arrays in more],
            )
        else:
            is_packed = path.suffix == ".gz"
            content = gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes()
            found = json.loads(content)
            order = rng.permutation(len(found))[: -(-len(found) // 2)]
            kept = [found[i] | {"name": f"again {n}"} for n, i in enumerate(order)]
            text = json.dumps(kept).encode()
            target.write_bytes(gzip.compress(text) if is_packed else text)
    for path in sorted((SOURCE / "models").iterdir()):
        if path.name in KEPT_MODELS:
            write_model(path, folder / "models" / renamed(path.name))


def read_family(path: Path):
    """Reads names, scalars and arrays of each case."""
    with np.load(path) as data:
        cases = [
            {key[5:]: data[key] for key in data.files if key.startswith(f"c{i:03d}.")}
            for i in range(len(data["names"]))
        ]
        return list(data["names"]), [json.loads(str(x)) for x in data["scalars"]], cases


def write_family(path: Path, names, scalars, cases) -> None:
    """Writes cases as `read_family` reads them."""
    arrays = {f"c{i:03d}.{key}": x for i, case in enumerate(cases) for key, x in case.items()}
    texts = [json.dumps(entry) for entry in scalars]
    np.savez_compressed(path, names=np.array(names), scalars=np.array(texts), **arrays)


# --- index ops, by the plain loops


def next_token(rng):
    """Draws a batch of 23 requests with 6 columns."""
    V = 977
    sampled = rng.integers(-3, V + 3, (23, 6), dtype=np.int32)
    discard, backup = rng.random(23) < 0.25, rng.integers(0, V, 23, dtype=np.int32)
    token, count = ops.next_token(sampled, discard, backup, vocab_size=V)
    arrays = {
        "in.sampled_token_ids": sampled,
        "in.discard_request_mask": discard,
        "in.backup_next_token_ids": backup,
        "out.next_token_ids": np.array(token, np.int32),
        "out.valid_sampled_tokens_count": np.array(count, np.int32),
    }
    return [({"vocab_size": V, "width": 6}, arrays)]


def sample_index(rng):
    """Draws a batch of 101 requests."""
    drafts = rng.integers(0, 5, 101)
    kept, start = rng.integers(0, drafts + 2), np.cumsum([0, *(drafts + 1)])
    index, rejected = ops.sample_index(np.cumsum(drafts), kept, start)
    arrays = {
        "in.cu_num_draft_tokens": np.cumsum(drafts),
        "in.valid_sampled_tokens_count": kept,
        "in.query_start_loc": start,
        "out.token_indices_to_sample": np.array(index),
        "out.num_rejected_tokens": np.array(rejected),
    }
    return [({}, {key: x.astype(np.int32) for key, x in arrays.items()})]


def eagle_step(rng):
    """Draws a batch of 50 requests in a pass of 57, with a table of two columns."""
    positions = rng.integers(0, 26, 50)
    table, lengths = rng.integers(0, 50, (50, 2), dtype=np.int32), positions + 1
    got = ops.eagle_step(positions, table, lengths, page_size=4, max_model_len=23, num_rows=57)
    slots = np.array([*got[1], -777777, -777777, -777777])
    scalars = {"block_size": 4, "max_model_len": 23, "input_batch_size": 57}
    arrays = {
        "in.positions": positions,
        "in.block_table": table,
        "in.seq_lens": lengths.astype(np.int32),
        "out.clamped_positions": np.array(got[0]),
        "out.slot_mapping": slots,
        "out.seq_lens": np.array(got[2], np.int32),
    }
    return [(scalars | {"block_table_cols": 2, "steps": None}, arrays)]


BY_LOOPS = {
    "eagle_prepare_next_token_padded": next_token,
    "eagle_prepare_inputs_padded": sample_index,
    "eagle_step_slot_mapping": eagle_step,
}


# --- models

KEPT_MODELS = {
    *("target_llama", "target_qwen3", "draft_llama_small", "eagle1_llama_fcbias", "eagle3_llama"),
    *("peagle_llama", "medusa_llama_vllm", "dflash_qwen3_1layer", "dflash2_qwen3", "mimo_mtp"),
    "e2e_llama_eagle3",
}


def renamed(text: str) -> str:
    """Replaces the names of models."""
    return re.sub(r"\w+", lambda word: RENAMED.get(word[0], word[0]), text)


def write_model(source: Path, target: Path) -> None:
    """Copies a model or a run without its first prompt, under other names."""
    shutil.copytree(source, target)
    for name in ("README.md", "case.json"):
        if (target / name).exists():
            text = renamed((target / name).read_text())
            (target / name).write_text(re.sub(r'("num_prompts": )8', r"\g<1>7", text))
    with np.load(source / "expected.npz") as data:
        parts = {key: key.rpartition("_") for key in data.files}
        arrays = {
            f"{name}_{int(i) - 1}": data[key] for key, (name, _, i) in parts.items() if i != "0"
        }
    np.savez_compressed(target / "expected.npz", **arrays)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
