"""The KV cache of a played vLLM, as far as it has a size: who begins, who begins in part, who gives way."""

from tests.support.protocol_world.steps import Running
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.overlap import Readiness
from triptych_vllm_connector.scheduler.partial_preemption import PartialRequests

MAX_PARTIAL = 2  # seats of incomplete partial requests


class KvRoom:
    """The part of `ConsumerActor` that knows what is free. A request holds the blocks of its whole prompt."""

    consumer: Consumer
    partial: PartialRequests
    num_kv_blocks: int
    live: dict[str, Running]
    running: list[str]
    is_full = False  # the last step left a request waiting that has all of its items

    @property
    def num_free_kv_blocks(self) -> int:
        return self.num_kv_blocks - sum(self.live[each].prompt_len for each in self.running)

    @property
    def stalled(self) -> list[str]:
        """Partial requests that wait in their midst, the newest last."""
        return [each for each in self.running if each in self.partial and self.consumer.status(each).waits]

    def preempt(self, engine_request_id: str) -> None:
        raise NotImplementedError

    def take_blocks(self, each: Running) -> None:
        """It runs from now on."""

    def free_blocks(self, engine_request_id: str) -> None:
        """It runs no more, if it did."""

    def may_leave_parking(self, engine_request_id: str) -> bool:
        if (
            self.consumer.status(engine_request_id).has_failed
            or self.consumer.readiness_now(engine_request_id) is not Readiness.PART
        ):
            return True
        return self.may_begin_in_part(self.live[engine_request_id])

    def may_begin_in_part(self, each: Running) -> bool:
        if self.partial.may_begin(each.prompt_len, self.num_free_kv_blocks):
            return True
        self.consumer.begin_whole(each.engine_request_id)
        return False

    def make_room(self, each: Running) -> bool:
        """Does its prompt fit, once the newest of those that wait in their midst have given way?"""
        while each.prompt_len > self.num_free_kv_blocks:
            victims = self.victims()
            if not victims:
                return False
            self.preempt(victims[-1])
        return True

    def victims(self) -> list[str]:
        return self.stalled

    def check_kv_room(self) -> None:
        """What incomplete requests hold is bounded, and they keep nothing from a request that can run."""
        held = [each for each in self.partial.ids() if self.consumer.num_missing(each)]
        assert set(held) <= set(self.running)
        assert len(held) <= MAX_PARTIAL, "incomplete requests hold too many seats"
        num_blocks = sum(self.live[each].prompt_len for each in held)
        assert len(held) <= 1 or num_blocks <= self.num_kv_blocks // 2, "incomplete requests hold too much"
        assert not (self.is_full and self.stalled), "a request that can run waits for one that cannot"
