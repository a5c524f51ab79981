"""Cost of each stage: the model's only numbers, kept as JSON beside this module, with their origin.

Times are seconds of the thing that is occupied. A stage of the form `a + b·n` has its `a` in `..._s` and its
`b` in `..._row_s`, `..._token_s` and so on. A *row* is one embedding of an image, which takes the
place of one token of the prompt.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent / "stage_times"
Part = TypeVar("Part")


@dataclass(frozen=True)
class GatewayCosts:
    """One process, one event loop; media go through threads."""

    request_s: float  # loop: read, validate, route, send on
    request_rest_s: float  # loop: what a request costs beside that, while it waits for others
    item_s: float  # loop: order, sizes, metadata of one image
    item_rest_s: float  # likewise, of an image that is not known
    media_s: float  # thread: one image's base64, header, hash
    media_row_s: float  # thread: the same, for each row's pixels
    chunk_s: float  # loop: one event of a stream
    media_threads: int = 2


@dataclass(frozen=True)
class RedisCosts:
    """Costs of one Redis server with one thread."""

    command_s: float
    byte_s: float  # for each byte of a value, in or out
    hop_s: float  # from the sender's call to the reader's, idle; beside the server's own time
    item_commands: float  # of all parties together, for one image that is not known
    known_item_commands: float  # for one image whose tensor is there
    beat_commands: float  # of one registered instance, per second


@dataclass(frozen=True)
class EncoderCosts:
    """Host process with threads that preprocess; engine that takes waiting items into a step."""

    preprocess_s: float
    preprocess_row_s: float
    num_threads: int
    reserve_s: float  # waits of the host for store and Redis before the sizes go out
    step_s: float
    row_s: float
    step_rows: int  # of one step at most
    write_bytes_per_s: float  # the copy to where the consumer reads it
    seal_s: float  # from the end of the copy until readers are told


@dataclass(frozen=True)
class EngineCosts:
    """vLLM with its front: step = step_s + token_s · prefilled + sequence_s · decoding + context_s ·
    their KV."""

    front_s: float  # HTTP, template, tokens: CPU of the front before the engine sees the request
    front_token_s: float
    reply_s: float  # from the end of a step until the gateway has the token
    wake_s: float  # from the seal until the waiting request may be scheduled
    step_s: float
    token_s: float
    sequence_s: float
    context_s: float
    inject_bytes_per_s: float  # the consumer's copy, inside a step; 0: there is none
    max_step_tokens: int
    max_sequences: int
    kv_tokens: int
    cache_rows: int  # of images granted at once


@dataclass(frozen=True)
class StoreCosts:
    """One daemon a host, one command at a time."""

    command_s: float
    item_commands: float  # reserve, seal, pins, unpins of one image


@dataclass(frozen=True)
class StageTimes:
    """One model on one kind of machine."""

    name: str
    origin: str  # "measured" or "assumed"
    note: str
    row_bytes: int  # of one row of a tensor
    tokens_per_word: float
    template_tokens: float
    client_s: float  # the client's own time in what it measures
    shares_core: bool  # each engine, its host process and its front run on one core
    gateway: GatewayCosts
    redis: RedisCosts
    encoder: EncoderCosts
    engine: EngineCosts
    store: StoreCosts

    def save(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def load(cls, path: Path) -> "StageTimes":
        """A name without a folder is one of ours.

        Raises:
            ValueError: a field is missing or not known.
        """
        path = path if path.name.endswith(".json") else FOLDER / f"{path}.json"
        return stage_times(json.loads(path.read_text()))


PARTS: dict[str, type] = {
    "gateway": GatewayCosts,
    "redis": RedisCosts,
    "encoder": EncoderCosts,
    "engine": EngineCosts,
    "store": StoreCosts,
}


def stage_times(raw: dict[str, Any]) -> StageTimes:
    """Stage times from parsed JSON.

    Raises:
        ValueError: a field is missing or not known, or a time is negative.
    """
    parts: dict[str, Any] = {name: _part(cls, raw.get(name, {})) for name, cls in PARTS.items()}
    return _part(StageTimes, raw | parts)


def _part(cls: type[Part], raw: dict[str, Any]) -> Part:
    wanted = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if raw.keys() - wanted:
        raise ValueError(f"{cls.__name__} has no {sorted(raw.keys() - wanted)}")
    try:
        part = cls(**raw)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
    negative = [name for name, value in raw.items() if isinstance(value, (int, float)) and value < 0]
    if negative:
        raise ValueError(f"{cls.__name__}: negative: {negative}")
    return part


@dataclass(frozen=True)
class Deployment:
    """Numbers and placement of all processes, and their policies.

    `hosts`: (encoders, prefill_decodes) of each. `is_whole`: one deployment spans all hosts, and
    tensors cross
    between hosts at `link_bytes_per_s`; otherwise each host is a deployment of its own, with gateways, Redis
    and a store, and callers are spread over the hosts by their numbers of prefill_decodes.
    """

    name: str
    hosts: tuple[tuple[int, int], ...]
    gateways_per_host: int = 1
    is_whole: bool = False
    link_bytes_per_s: float = 0.0  # 0: through Redis
    num_slots: int = 4
    num_ahead: int = 0  # items preprocessed beyond the slots
    batch_items: int = 0  # of one encode step at most; 0: as many as wait
    overlap: bool = False
    is_monolith: bool = False  # every engine has the vision tower and encodes inside its steps

    def __post_init__(self) -> None:
        if not self.hosts or any(decodes < 1 for _, decodes in self.hosts):
            raise ValueError("each host needs an engine that serves")
        if not self.is_monolith and any(encoders < 1 for encoders, _ in self._cells()):
            raise ValueError("each deployment needs an encoder")

    def _cells(self) -> list[tuple[int, int]]:
        if self.is_whole:
            return [(sum(e for e, _ in self.hosts), sum(d for _, d in self.hosts))]
        return list(self.hosts)

    @property
    def num_encoders(self) -> int:
        return 0 if self.is_monolith else sum(encoders for encoders, _ in self.hosts)

    @property
    def num_prefill_decodes(self) -> int:
        return sum(decodes for _, decodes in self.hosts)
