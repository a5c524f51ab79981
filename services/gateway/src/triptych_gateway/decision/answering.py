"""One request at one instance: the work and the streams that it counts as, and what is learned of it."""

import time

from triptych_gateway.decision.courses import Course, CourseKind
from triptych_gateway.decision.instance_load import InstanceLoad
from triptych_gateway.decision.namespace_decisions import NamespaceDecisions


class Answering:
    """One request at one instance, from when it is sent, of which nothing is learned. `end` must follow."""

    def on_first_token(self, *, is_stream: bool) -> None:
        """The answer has begun; one that is no stream has ended with it, and says nothing of its parts."""

    def end(self) -> None:
        """In whatever way, at whatever time."""


class LearnedAnswering(Answering):
    """Counts as work before its instance, and what it took is learned."""

    def __init__(
        self, load: InstanceLoad, namespace: NamespaceDecisions | None, instance: str, course: Course
    ) -> None:
        self._load, self._namespace = load, namespace
        self._is_text = course.kind in (CourseKind.TEXT, CourseKind.SIZES_KNOWN)
        if self._is_text:
            load.begin_text(instance)
        self._instance, self._course = instance, course
        self._sent_at = time.monotonic()
        is_remote = course.kind is CourseKind.REMOTE
        self._since = course.decided_at if is_remote else self._sent_at
        due_at = self._since + course.encode_s
        self._busy_s = load.work_ahead(instance, self._sent_at).busy_s(max(0.0, due_at - self._sent_at))
        self._work_id: int | None = load.begin_work(instance, due_at, course.work_s)
        self._total_s = load.total_work_s(instance)
        self._is_streaming = False

    def on_first_token(self, *, is_stream: bool) -> None:
        now = time.monotonic()
        self._end_work(now)
        if not is_stream:
            return
        self._is_streaming = True
        self._load.begin_stream(self._instance)
        if self._namespace is not None:
            disturbed_s = self._load.total_work_s(self._instance) - self._total_s
            self._namespace.on_first_token(self._course, self._busy_s, disturbed_s, now - self._since, now)

    def end(self) -> None:
        self._end_work(time.monotonic())
        if self._is_streaming:
            self._is_streaming = False
            self._load.end_stream(self._instance)
        if self._is_text:
            self._is_text = False
            self._load.end_text(self._instance)

    def _end_work(self, now: float) -> None:
        if self._work_id is not None:
            self._load.end_work(self._instance, self._work_id, now)
            self._work_id = None
        if self._course.place is not None:
            self._course.place.leave()
