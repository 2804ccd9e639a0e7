"""The rotary position embedding's static choices, read from a config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn"]

# Parameters of a rope in config.json that each kind needs, and our names for them.
_NEEDED: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_len",
    },
    "yarn": {"factor": "factor", "original_max_position_embeddings": "original_max_len"},
}
_OPTIONAL: dict[str, dict[str, str]] = {
    "yarn": {
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attn_factor": "attn_factor",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
# Parameters that we read whatever the kind; the last two only where they change nothing.
_KEYS = {
    *("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved"),
    *("partial_rotary_factor", "extrapolation_factor"),
    *(key for keys in (*_NEEDED.values(), *_OPTIONAL.values()) for key in keys),
}


def check_above_0(owner: str, **fields: float) -> None:
    """Raises ValueError for the first field that is no number above 0."""
    for name, value in fields.items():
        # The comparison refuses NaN, too; JSON may say Infinity.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise ValueError(
                f"{owner}: {name} is {value!r}, wanted a number above 0. Correct it in config.json."
            )


def check_bool(owner: str, **fields: bool) -> None:
    """Raises ValueError for the first field that is neither true nor false."""
    for name, value in fields.items():
        if not isinstance(value, bool):
            raise ValueError(
                f"{owner}: {name} is {value!r}, wanted true or false. Correct it in config.json."
            )


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Chooses the frequencies of the rotary position embedding, and the axes that they turn by.

    Attributes:
      kind: "default"; "linear" divides positions by `factor`; "llama3" divides the low frequencies
        by `factor`, keeps the high ones and blends in between; "yarn" does so with a ramp over the
        frequencies' indices, and scales cosine and sine.
      theta: base of the geometric series of frequencies.
      factor: how far the context is stretched.
      low_freq_factor: frequencies that turn less often than this in the original context are low.
      high_freq_factor: those that turn more often than this are high.
      original_max_len: the context before stretching, in tokens.
      beta_fast: yarn keeps frequencies that turn more often than this in the original context.
      beta_slow: yarn divides those that turn less often than this.
      attn_factor: further factor of yarn's cosine and sine.
      attention_factor: yarn's whole factor of cosine and sine; None = `attn_factor` times
        0.1 ln(factor) + 1.
      truncate: yarn's ramp begins and ends at whole indices.
      mrope_section: frequencies that turn by the first, second and third axis of a position
        (M-RoPE), half a head together; None = positions have one axis.
      mrope_interleaved: the axes take turns along the frequencies, instead of lying side by side.

    Raises:
      ValueError: a parameter that the kind needs is not above 0, or sections that are not three.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attn_factor: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False

    def __post_init__(self):
        needed = {"theta", "factor", *_NEEDED[self.kind].values()}
        needed |= set(_OPTIONAL.get(self.kind, {}).values()) - {"attention_factor", "truncate"}
        check_above_0("RopeConfig", **{name: getattr(self, name) for name in sorted(needed)})
        if self.attention_factor is not None:
            check_above_0("RopeConfig", attention_factor=self.attention_factor)
        sections = self.mrope_section
        if sections is None:
            return
        fits = isinstance(sections, tuple) and len(sections) == 3
        if not fits or any(type(size) is not int or size < 0 for size in sections):
            raise ValueError(
                f"RopeConfig: mrope_section is {sections!r}, wanted a tuple of three counts of "
                "frequencies, for example (16, 24, 24)."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`, of a config.json.

        Raises:
          ValueError: an unknown kind or parameter, or one that the kind needs is missing.
          NotImplementedError: positions with axes of another kind (XD-RoPE).
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(
                f"RopeConfig: rope_parameters (or rope_scaling) is {rope!r}, wanted an object. "
                "Correct the model's config.json."
            )
        if "xdrope_section" in rope:
            raise NotImplementedError(
                f"RopeConfig: model type {config.get('model_type')!r} has XD-RoPE (xdrope_section "
                f"{rope['xdrope_section']!r}), which is not supported, wanted one axis, or three "
                "(mrope_section). Take a model without it."
            )
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "mrope":  # the name of its axes, not of its frequencies
            kind = "default"
            if rope.get("mrope_section") is None:
                raise ValueError(
                    "RopeConfig: rope type 'mrope' needs ['mrope_section'], and the config has "
                    f"only {sorted(rope)}. Add it to rope_parameters (or rope_scaling)."
                )
        if kind not in tuple(_NEEDED):  # a list, for one, has no hash
            raise ValueError(
                f"RopeConfig: rope type {kind!r} is not supported, wanted one of "
                f"{', '.join(_NEEDED)}, mrope. Its parameters are {dict(rope)}."
            )
        unknown = sorted(rope.keys() - _KEYS)
        if unknown:
            raise ValueError(
                f"RopeConfig: parameters {unknown} are not supported, wanted some of "
                f"{sorted(_KEYS)}. One set of parameters must serve all layers."
            )
        for key, why in (
            ("partial_rotary_factor", "only whole heads are rotated"),
            ("extrapolation_factor", "kept frequencies are kept whole"),
        ):
            if rope.get(key, 1.0) != 1.0:
                raise ValueError(f"RopeConfig: {key} is {rope[key]!r}, wanted 1.0: {why}.")
        missing = [key for key in _NEEDED[kind] if rope.get(key) is None]
        if missing:
            raise ValueError(
                f"RopeConfig: rope type {kind!r} needs {missing}, and the config has only "
                f"{sorted(rope)}. Add them to rope_parameters (or rope_scaling)."
            )
        theta = rope.get("rope_theta", config.get("rope_theta"))
        names = _NEEDED[kind] | _OPTIONAL.get(kind, {})
        fields = {name: rope[key] for key, name in names.items() if rope.get(key) is not None}
        sections = rope.get("mrope_section")
        interleaved = rope.get("mrope_interleaved")
        interleaved = False if interleaved is None else interleaved
        check_bool("RopeConfig", mrope_interleaved=interleaved)
        return cls(
            kind=kind,
            theta=cls.theta if theta is None else theta,
            mrope_section=tuple(sections) if isinstance(sections, list) else sections,
            mrope_interleaved=interleaved,
            **fields,
        )

    def to_hf(self) -> dict[str, Any]:
        """Writes what `from_hf` reads: `rope_theta`, and `rope_scaling` where there is some."""
        names = _NEEDED[self.kind] | _OPTIONAL.get(self.kind, {})
        values = {key: getattr(self, name) for key, name in names.items()}
        scaling = {key: value for key, value in values.items() if value is not None}
        if self.mrope_section is not None:
            scaling["mrope_section"] = list(self.mrope_section)
            scaling["mrope_interleaved"] = self.mrope_interleaved
        scaling = {"rope_type": self.kind} | scaling if scaling else None
        return {"rope_theta": self.theta, "rope_scaling": scaling}
