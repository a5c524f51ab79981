"""Table of all scorers by name: a file of routing profiles gives weights to these names."""

from collections.abc import Mapping

from triptych_gateway.routing.scheduling.candidates import Scorer
from triptych_gateway.routing.scheduling.scorers.hardware import HardwareScorer
from triptych_gateway.routing.scheduling.scorers.kv import KvScorer
from triptych_gateway.routing.scheduling.scorers.lora import LoraScorer
from triptych_gateway.routing.scheduling.scorers.media import MediaScorer
from triptych_gateway.routing.scheduling.scorers.media_near import MediaNearScorer
from triptych_gateway.routing.scheduling.scorers.prefix import PrefixScorer
from triptych_gateway.routing.scheduling.scorers.queue import QueueScorer
from triptych_gateway.routing.scheduling.scorers.session import SessionScorer
from triptych_gateway.routing.scheduling.scorers.tokens import TokensScorer

SCORERS: Mapping[str, Scorer] = {
    "prefix": PrefixScorer(),
    "session": SessionScorer(),
    "media": MediaScorer(),
    "media_near": MediaNearScorer(),
    "queue": QueueScorer(),
    "kv": KvScorer(),
    "lora": LoraScorer(),
    "hardware": HardwareScorer(),
    "tokens": TokensScorer(),
}
