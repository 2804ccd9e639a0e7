"""The rotary position embedding's static choices, read from a config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from jspec._checks import check_above_0, check_bool, warn
from jspec.models.options import agreed, section, size

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
_ALWAYS = {
    *("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved"),
    *("partial_rotary_factor", "extrapolation_factor"),
}
_KEYS = _ALWAYS.union(*_NEEDED.values(), *_OPTIONAL.values())


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
        """Reads `rope_scaling` or `rope_parameters`, and `rope_theta`, of a config.json.

        Where both objects are there and differ, `rope_scaling` counts; a `rope_theta` inside of it
        counts before the one beside it. Both as in transformers 5, with a warning.

        Raises:
          ValueError: an unknown kind or parameter, or one that the kind needs is missing, or two
            keys that transformers 4 and 5 read differently disagree.
          NotImplementedError: positions with axes of another kind (XD-RoPE).
        """
        name, rope = _parameters(config)
        if "xdrope_section" in rope:
            raise NotImplementedError(
                f"RopeConfig: model type {config.get('model_type')!r} has XD-RoPE (xdrope_section "
                f"{rope['xdrope_section']!r}), which is not supported, wanted one axis, or three "
                "(mrope_section). Take a model without it."
            )
        kind = _kind(name, rope) or "default"
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
                f"{', '.join(_NEEDED)}, mrope. {name} is {dict(rope)}."
            )
        unknown = sorted(rope.keys() - _KEYS)
        if unknown:
            raise ValueError(
                f"RopeConfig: parameters {unknown} of {name} are not supported, wanted some of "
                f"{sorted(_KEYS)}. One set of parameters must serve all layers."
            )
        for key, why in (
            ("partial_rotary_factor", "only whole heads are rotated"),
            ("extrapolation_factor", "kept frequencies are kept whole"),
        ):
            if rope.get(key) not in (None, 1.0):
                raise ValueError(f"RopeConfig: {key} is {rope[key]!r}, wanted 1.0: {why}.")
        _warn_of_others(name, rope, kind)
        if kind in ("yarn", "llama3"):
            rope = {**rope, _ORIGINAL: _original(name, rope, config, kind)}
        rope = {key: value for key, value in rope.items() if value is not None}
        missing = [key for key in _NEEDED[kind] if key not in rope]
        if missing:
            raise ValueError(
                f"RopeConfig: rope type {kind!r} needs {missing}, and the config has only "
                f"{sorted(rope)}. Add them to rope_parameters (or rope_scaling)."
            )
        stated = {f"{name}.rope_theta": rope.get("rope_theta")}
        theta = agreed(stated | {"rope_theta": config.get("rope_theta")}, reader="transformers 5")
        names = _NEEDED[kind] | _OPTIONAL.get(kind, {})
        given = {key: rope[key] for key in names if key in rope}
        if "truncate" in given:
            check_bool("RopeConfig", truncate=given["truncate"])
        numbers = given | {"rope_theta": cls.theta if theta is None else theta}
        numbers.pop("truncate", None)
        check_above_0("RopeConfig", **numbers)
        sections = rope.get("mrope_section")
        interleaved = rope.get("mrope_interleaved")
        interleaved = False if interleaved is None else interleaved
        check_bool("RopeConfig", mrope_interleaved=interleaved)
        return cls(
            kind=kind,
            theta=numbers["rope_theta"],
            mrope_section=tuple(sections) if isinstance(sections, list) else sections,
            mrope_interleaved=interleaved,
            **{names[key]: value for key, value in given.items()},
        )

    def context(self, max_positions: int) -> int:
        """Returns the longest context in tokens, of what `max_position_embeddings` says.

        YaRN stretches `original_max_len` by `factor`, linear scaling stretches the stated length.

        Source: vLLM config/model.py, _get_and_verify_max_len.

        Example:
          >>> RopeConfig(kind="yarn", factor=4.0, original_max_len=512).context(512)
          2048
        """
        if self.kind not in ("linear", "yarn"):
            return max_positions
        stretched = self.original_max_len if self.kind == "yarn" else max_positions
        return int(min(self.factor * stretched, _MOST_POSITIONS))

    def before_scaling(self, context: int) -> int:
        """Returns what `max_position_embeddings` says of a context, see `context`."""
        if self.kind != "linear":
            return context
        return math.ceil(context / self.factor - 1e-9)  # `context` rounds down

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


_MOST_POSITIONS = (1 << 31) - 1
"""Positions are int32."""

_ORIGINAL = "original_max_position_embeddings"


def _parameters(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the key of the object that holds a rope's parameters, and the object."""
    old, new = section(config, "rope_scaling"), section(config, "rope_parameters")
    if not old:
        scales = (new.get("rope_type") or new.get("type")) not in (None, "default", "mrope")
        if scales and "rope_scaling" in config:
            warn(
                f"config.json says rope_scaling {config['rope_scaling']!r} and rope_parameters "
                f"{dict(new)}. rope_parameters is used, as in transformers 5. Remove the other."
            )
        return "rope_parameters", new
    theta = {"rope_theta": config.get("rope_theta")}
    sides = [theta | {key: x for key, x in side.items() if x is not None} for side in (old, new)]
    for side in sides:
        side["rope_type"] = side.get("rope_type", side.pop("type", "default"))
    if new and sides[0] != sides[1]:
        warn(
            f"config.json says rope_scaling {dict(old)} and rope_parameters {dict(new)}, which "
            "mean the same setting. rope_scaling is used, as in transformers. Remove the wrong one."
        )
    return "rope_scaling", old


def _kind(name: str, rope: Mapping[str, Any]) -> Any:
    """Returns the type of a rope, under its new key or its old one."""
    new, old = rope.get("rope_type"), rope.get("type")
    if new is not None and old not in (None, new) and (new, old) != ("default", "mrope"):
        raise ValueError(
            f"RopeConfig: {name} says rope_type {new!r} and type {old!r}, and transformers 4 reads "
            "the one, transformers 5 the other. Remove the wrong one from config.json."
        )
    if new is None and old is None and rope.get("factor") is not None:
        raise ValueError(
            f"RopeConfig: {name} has factor {rope['factor']!r} and no rope_type that says what it "
            f"stretches. Add one of {', '.join(_NEEDED)} in config.json."
        )
    return old if new is None else new


def _warn_of_others(name: str, rope: Mapping[str, Any], kind: str) -> None:
    """Warns of parameters that belong to other kinds of rope."""
    read = _ALWAYS | _NEEDED[kind].keys() | _OPTIONAL.get(kind, {}).keys()
    unread = {key: value for key, value in rope.items() if value is not None and key not in read}
    if unread:
        warn(
            f"config.json says {name}.rope_type {kind!r} and {unread}, which that type has not. "
            "The type counts, as in transformers. Correct it, or remove the rest."
        )


def _original(name: str, rope: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> Any:
    """Returns the context before stretching, which may stand in either of two places."""
    inside, beside = rope.get(_ORIGINAL), config.get(_ORIGINAL)
    if None not in (inside, beside) and inside != beside:
        raise ValueError(
            f"RopeConfig: config.json says {name}.{_ORIGINAL} {inside!r} and {_ORIGINAL} "
            f"{beside!r}, and transformers 4 reads the one, transformers 5 the other. Remove the "
            "wrong one."
        )
    inside = beside if inside is None else inside
    if inside is None and kind == "yarn" and config.get("max_position_embeddings") is not None:
        inside = size(config, "max_position_embeddings")
        warn(
            f"config.json has YaRN without {name}.{_ORIGINAL}, so that max_position_embeddings "
            f"{inside} is taken for it, as in transformers. Add it to {name}."
        )
    return inside
