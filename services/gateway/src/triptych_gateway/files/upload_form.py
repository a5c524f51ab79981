"""Multipart body with one file and a few fields, parsed as it arrives. Pure; the file's bytes pass through.

Bounded: parts, their headers, the fields' values, and all that is no file's content. The reader bounds the
file's bytes.
"""

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from triptych_common.domain.errors import RequestError
from triptych_gateway.files.file_record import KEPT_NAME_CHARS, PURPOSES, Purpose
from triptych_gateway.settings import FileSettings

FILE_FIELD = "file"
PURPOSE_FIELD = "purpose"
ANCHOR_FIELD = "expires_after[anchor]"
SECONDS_FIELD = "expires_after[seconds]"
ANCHOR = "created_at"
DEFAULT_NAME = "upload"
MAX_PARTS = 16
MAX_DELIMITERS = 2 * MAX_PARTS  # also such as end no part; clients choose boundaries that no content has
MAX_HEADERS = 8  # of one part
MAX_HEADER_BYTES = 4096
MAX_VALUE_BYTES = 1024
MAX_FORM_BYTES = MAX_PARTS * (MAX_HEADERS * MAX_HEADER_BYTES + MAX_VALUE_BYTES)
"""Bytes of a body besides its file; far more than any client sends."""


@dataclass
class UploadForm:
    """Parser of one body. `feed` it, then `finish`."""

    boundary: bytes
    filename: str | None = None  # once the file's part has begun
    fields: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parser = MultipartParser(
            self.boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        self._num_parts = 0
        self._delimiter, self._num_delimiters = b"\r\n--" + self.boundary, 0
        self._num_form_bytes = 0  # that are no file's content
        self._header, self._disposition, self._value = bytearray(), bytearray(), bytearray()
        self._header_value = bytearray()
        self._name = ""  # of the part that is being read
        self._pieces: list[bytes] = []
        self._has_ended = False

    @classmethod
    def of_content_type(cls, content_type: str | None) -> "UploadForm":
        """Make the parser for a body of this type. Raises RequestError: 400, no multipart form."""
        kind, options = parse_options_header(content_type or "")
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise _malformed("the body must be multipart/form-data, with a boundary")
        try:
            return cls(boundary)
        except FormParserError as error:
            raise _malformed("its boundary is too long") from error

    def feed(self, chunk: bytes) -> list[bytes]:
        """Parse the next bytes and return those of the file among them. Raises RequestError: 400."""
        # The parser takes what is no file's content byte by byte, and each false end of a part likewise.
        self._num_delimiters += chunk.count(self._delimiter)
        if self._num_delimiters > MAX_DELIMITERS:
            raise _malformed("its content contains its boundary")
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed("it is not well formed") from error
        self._num_form_bytes += len(chunk)
        if self._num_form_bytes > MAX_FORM_BYTES:
            raise _malformed(f"it has more than {MAX_FORM_BYTES} bytes besides its file")
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """Finish the body at its end. Raises RequestError: 400, too early, or there was no file."""
        if not self._has_ended:
            raise _malformed("it ends before its last boundary")
        if self.filename is None:
            raise RequestError(400, "missing_field", "file is missing", FILE_FIELD)

    # ---- the parser's calls ----------------------------------------------------------------------
    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._disposition.clear()
        self._value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition[:] = self._header_value
        self._header.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == FILE_FIELD:
            if self.filename is not None:
                raise _malformed("it has more than one file")
            self.filename = _kept_name(options.get(b"filename", b""))
        elif self._name in self.fields:
            raise _malformed("it has the same field twice")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE_FIELD:
            self._num_form_bytes -= end - start
            self._pieces.append(data[start:end])
            return
        if len(self._value) + end - start > MAX_VALUE_BYTES:
            raise _malformed(f"it has a field of more than {MAX_VALUE_BYTES} bytes")
        self._value += data[start:end]

    def _on_part_end(self) -> None:
        if self._name != FILE_FIELD:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._has_ended = True


def purpose_of(form: UploadForm) -> Purpose:
    """Return the purpose of the file. Raises RequestError: 400."""
    text = form.fields.get(PURPOSE_FIELD)
    if text is None:
        raise RequestError(400, "missing_field", "purpose is missing", PURPOSE_FIELD)
    for purpose in PURPOSES:
        if text == purpose:
            return purpose
    raise RequestError(400, "invalid_value", f"purpose must be one of {', '.join(PURPOSES)}", PURPOSE_FIELD)


def lifetime_of(form: UploadForm, limits: FileSettings) -> int:
    """Return the seconds from the upload until the file expires. Raises RequestError: 400."""
    anchor, seconds = form.fields.get(ANCHOR_FIELD), form.fields.get(SECONDS_FIELD)
    if anchor is None and seconds is None:
        return limits.files_lifetime_s
    if anchor != ANCHOR:
        raise RequestError(400, "invalid_value", f"{ANCHOR_FIELD} must be {ANCHOR}", ANCHOR_FIELD)
    longest = limits.files_max_lifetime_s
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 16):
        raise RequestError(400, "invalid_value", f"{SECONDS_FIELD} must be a whole number", SECONDS_FIELD)
    if not 1 <= int(seconds) <= longest:
        message = f"{SECONDS_FIELD} must be from 1 to {longest}"
        raise RequestError(400, "invalid_value", message, SECONDS_FIELD)
    return int(seconds)


def _kept_name(raw: bytes) -> str:
    """Clean a client's file name: text for people, part of no path."""
    text = "".join(each for each in raw.decode("utf-8", "replace") if each.isprintable())
    return text[:KEPT_NAME_CHARS] or DEFAULT_NAME


def _malformed(fault: str) -> RequestError:
    return RequestError(400, "invalid_multipart", f"the upload cannot be read: {fault}")
