"""The numbers that decide a Megatron layout: the model's sizes, and a rank's position.

Experts have their own rank groups: a rank's number among the expert ranks (`ep`, `etp`) does not
follow from its number among the dense ones (`tp`), so a `Position` has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollway.errors import UsageError

_MAX_LAYERS = 1 << 14
_MAX_EXPERTS = 1 << 20  # Experts of all layers together
"""Far above any model. They decide how many tensors are listed in memory."""
_CHECK_CONFIG = "Check the model's config."


@dataclass(frozen=True)
class ModelGeometry:
    """The sizes of a transformer that decide where its weights are stored."""

    layers: int
    hidden: int
    heads: int
    query_groups: int
    head_dim: int
    vocab: int  # Rows of the Hugging Face embedding; Megatron may add rows as padding
    experts: int = 0
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = self.hidden, self.heads, self.query_groups, self.head_dim, self.vocab
        if min(self.layers, *sizes) < 1 or self.experts < 0:
            raise UsageError(f"A size of the model is below 1: {self}.", _CHECK_CONFIG)
        if self.layers > _MAX_LAYERS or self.layers * self.experts > _MAX_EXPERTS:
            raise UsageError(
                f"{self.layers} layers of {self.experts} experts are too many: there are at most "
                f"{_MAX_LAYERS} layers, and {_MAX_EXPERTS} experts in all of them.",
                _CHECK_CONFIG,
            )
        if self.heads % self.query_groups:
            raise UsageError(
                f"{self.heads} heads cannot be shared out to {self.query_groups} query groups.",
                _CHECK_CONFIG,
            )

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.query_groups

    @property
    def query_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_rows(self) -> int:
        return self.query_groups * self.head_dim

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """Read the sizes from a `config.json`, including the field names of single families."""
        try:
            config = config.get("text_config") or config
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                heads=heads,
                query_groups=_read_first(config, "num_key_value_heads") or heads,
                head_dim=_read_first(config, "head_dim") or hidden // heads,
                vocab=int(config["vocab_size"]),
                experts=_read_first(config, "num_experts", "num_local_experts", "n_routed_experts"),
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise UsageError(
                f"The model's config.json lacks {error.args[0]}.", "Save the model's config again."
            ) from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UsageError(
                f"The model's config.json has a size that is no whole number ({error}).",
                "Save the model's config again.",
            ) from error


def _read_first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's number in every parallel group; `dp` and `edp` count the replicas."""

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1
    dp: int = 0
    dp_size: int = 1
    edp: int = 0
    edp_size: int = 1

    def local_experts(self, geometry: ModelGeometry) -> int:
        """Return how many experts this rank holds."""
        if geometry.experts % self.ep_size:
            raise UsageError(
                f"{geometry.experts} experts cannot be shared evenly by {self.ep_size} ranks.",
                "Use an expert parallel size that divides them.",
            )
        return geometry.experts // self.ep_size


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of a trainer's parallel groups; ranks are numbered as Megatron does by default."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    world: int = 0  # All ranks; 0 means as few as these groups need

    def positions(self) -> list[Position]:
        """Return the position of every rank: tensor ranks are neighbours, stages are far apart."""
        dense, expert = self.tp * self.pp, self.ep * self.etp * self.pp
        world = self.world or max(dense, expert)
        if world % dense or world % expert:
            raise UsageError(
                f"{world} ranks cannot form groups of tp={self.tp} pp={self.pp} ep={self.ep} "
                f"etp={self.etp}.",
                f"Use a multiple of {dense} and of {expert}.",
            )
        return [self._find_position(rank, world) for rank in range(world)]

    def _find_position(self, rank: int, world: int) -> Position:
        stage = world // self.pp
        pp, inside = divmod(rank, stage)
        expert = self.ep * self.etp
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp}
        return Position(
            tp=inside % self.tp,
            pp=pp,
            ep=inside // self.etp % self.ep,
            etp=inside % self.etp,
            dp=inside // self.tp,
            dp_size=stage // self.tp,
            edp=inside // expert,
            edp_size=stage // expert,
            **{f"{group}_size": size for group, size in sizes.items()},
        )
