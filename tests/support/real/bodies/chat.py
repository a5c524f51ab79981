"""Chat completions, with images and without."""

import base64
import io
from typing import Any

from PIL import Image

from tests.support.real.bodies.case import NULL, Table, table, with_streams

PATH = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 6}
USER = {"role": "user", "content": "read the digits"}
ASKED = {"messages": [USER]}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


def said(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def parts(*content: Any) -> dict[str, Any]:
    return said({"role": "user", "content": list(content)})


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image_url(
    color: int,
    image_format: str = "PNG",
    size: tuple[int, int] = (56, 28),
    media_type: str | None = None,
    **options: Any,
) -> str:
    """A picture of one color; `options` are the format's."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (color, 255 - color, color // 2)).save(buffer, image_format, **options)
    kind = f"image/{image_format.lower()}" if media_type is None else media_type
    return f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(color: int, image_format: str = "PNG", **how: Any) -> dict[str, Any]:
    """A part with a picture as `image_url` makes it."""
    return {"type": "image_url", "image_url": {"url": image_url(color, image_format, **how)}}


def image(color: int, image_format: str = "PNG", **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_url(color, image_format), **fields}}


_TEXTS: dict[str, dict[str, Any]] = {
    "plain": ASKED,
    "system": said({"role": "system", "content": "be short"}, USER),
    "developer": said({"role": "developer", "content": "be short"}, USER),
    "several turns": said(
        USER, {"role": "assistant", "content": "1 2"}, {"role": "user", "content": "again"}
    ),
    "assistant's turn as parts": said(USER, {"role": "assistant", "content": [text("1")]}, USER),
    "name": said({**USER, "name": "ann"}),
    "parts": parts(text("read"), text("the digits")),
    "strings as parts": parts("read", "the digits"),
    "text with nulls": parts({**text("read"), "image_url": NULL, "input_audio": NULL}),
    "null text": parts({"type": "text", "text": NULL}, text("read")),
    "null text of a system prompt": said(
        {"role": "system", "content": [{"type": "text", "text": NULL}]}, USER
    ),
    "null text of another role": said({"role": "r", "content": [{"type": "text", "text": NULL}]}, USER),
    "null refusal": said(
        USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": NULL}]}, USER
    ),
    "other roles": said({"role": "ipython", "content": "1 2"}, {"role": "observation", "content": "3"}, USER),
    "no model": ASKED | {"model": None},
    "null model": ASKED | {"model": NULL},
    "empty model": ASKED | {"model": ""},
    "not streamed": ASKED | {"stream": 0},
    "salt": ASKED | {"cache_salt": "of a caller"},
    "empty text": said({"role": "user", "content": ""}),
    "no content": said(USER, {"role": "assistant", "content": NULL}, USER),
    "other scripts": said({"role": "user", "content": "12 é 漢字 🎲 \u0000 \t\n"}),
    "continued": said(USER, {"role": "assistant", "content": "1 "})
    | {"continue_final_message": True, "add_generation_prompt": False},
    "without the answer's beginning": ASKED | {"add_generation_prompt": False},
    "special tokens": ASKED | {"add_special_tokens": True},
    "unknown field": ASKED | {"not_known_to_anyone": {"a": [1]}},
    "user and metadata": ASKED | {"user": "u", "metadata": {"a": "b"}, "store": False},
    "template's options": ASKED | {"chat_template_kwargs": {"enable_thinking": False}},
    "documents": ASKED | {"documents": [{"title": "a", "text": "b"}]},
    "default length": ASKED | {"max_tokens": None, "max_completion_tokens": 5},
    "both lengths": ASKED | {"max_completion_tokens": 3},
    "one token": ASKED | {"max_tokens": 1},
    "n": ASKED | {"n": 3, "temperature": 1.0, "seed": 11},
    "seed": ASKED | {"temperature": 0.8, "seed": 5},
    "seed, top_p, top_k, min_p": ASKED
    | {"temperature": 1.2, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    "logprobs": ASKED | {"logprobs": True},
    "top logprobs": ASKED | {"logprobs": True, "top_logprobs": 3},
    "prompt logprobs": ASKED | {"prompt_logprobs": 1},
    "token ids": ASKED | {"return_token_ids": True},
    "tokens as token ids": ASKED | {"logprobs": True, "return_tokens_as_token_ids": True},
    "echo": ASKED | {"echo": True},
    "stop": ASKED | {"stop": "1"},
    "stops": ASKED | {"stop": ["1", "2", " "], "max_tokens": 16},
    "stop included": ASKED | {"stop": [" "], "include_stop_str_in_output": True, "max_tokens": 16},
    "stop by token": ASKED | {"stop_token_ids": [5, 6, 7, 8, 9, 10, 11, 12]},
    "ignore eos": ASKED | {"ignore_eos": True, "min_tokens": 6},
    "special tokens shown": ASKED | {"skip_special_tokens": False},
    "penalties": ASKED | {"presence_penalty": 0.5, "frequency_penalty": 0.4},
    "repetition penalty": ASKED | {"repetition_penalty": 1.3},
    "logit bias": ASKED | {"logit_bias": {"7": 100.0}},
    "allowed tokens": ASKED | {"allowed_token_ids": [9, 10, 11]},
    "bad words": ASKED | {"bad_words": ["1", "2"]},
    "priority": ASKED | {"priority": 3},
    "null fields": ASKED | {"stop": NULL, "n": NULL, "logprobs": NULL, "seed": NULL, "top_p": NULL},
    "no tools": ASKED | {"tools": NULL, "tool_choice": "none"},
    "json": ASKED | {"response_format": {"type": "json_object"}},
    "text format": ASKED | {"response_format": {"type": "text"}},
    "choice": ASKED | {"structured_outputs": {"choice": ["12", "34"]}},
    "regex": ASKED | {"structured_outputs": {"regex": "[0-9]{3}"}},
}
_IMAGES: dict[str, dict[str, Any]] = {
    "image": parts(image(10), text("read")),
    "image behind": parts(text("read"), image(20)),
    "two images": parts(image(30), text("and"), image(40)),
    "image twice": parts(image(50), image(50)),
    "image with detail": parts(image(60, detail="low")),
    "jpeg": parts(image(70, "JPEG")),
    "webp": parts(image(80, "WEBP")),
    "image and logprobs": parts(image(90)) | {"logprobs": True, "top_logprobs": 2},
    # None has a seed: on a CPU, vLLM 0.32 ends at a seeded request whose prompt is computed in parts.
    "tiff": parts(picture(71, "TIFF")),
    "tiff of lzw": parts(picture(72, "TIFF", compression="tiff_lzw")),
    "tiff of jpeg": parts(picture(73, "TIFF", compression="jpeg")),
    "tiff of pages": parts(
        picture(74, "TIFF", save_all=True, append_images=[Image.new("RGB", (28, 28))], compression="packbits")
    ),
    "avif": parts(picture(75, "AVIF")),
    "jpeg 2000": parts(picture(76, "JPEG2000")),
    "jpeg 2000 codestream": parts(picture(77, "JPEG2000", no_jp2=True)),
    "ppm": parts(picture(78, "PPM")),
    "icon": parts(picture(79, "ICO")),
    "tga": parts(picture(81, "TGA")),
    "tga of runs": parts(picture(82, "TGA", compression="tga_rle")),
    "qoi": parts(picture(83, "QOI")),
    "a type alone": parts(picture(84, media_type="image")),
    "a type of bytes": parts(picture(85, media_type="application/octet-stream")),
    "no media type": parts(picture(86, media_type="")),
    "a wrong media type": parts(picture(87, media_type="image/jpeg")),
    "a type of text": parts(picture(88, media_type="text/plain;charset=utf-8")),
    "image with nulls": parts({**picture(89), "text": NULL, "video_url": NULL, "input_audio": NULL}),
    "text with nulls": parts(picture(91), {**text("read"), "image_url": NULL, "video_url": NULL}),
    "image without a type": parts({"image_url": image_url(92)}, text("read")),
    "image object without a type": parts({"image_url": {"url": image_url(99)}}, text("read")),
    "image without a type of another role": said({"role": "r", "content": [{"image_url": image_url(98)}]}),
    "image of another role": said({"role": "observation", "content": [picture(93), text("read")]}),
    "image and no model": parts(picture(94)) | {"model": None},
    "image and a salt": parts(picture(95)) | {"cache_salt": "a"},
    "twenty images": parts(*(picture(color, size=(28, 28)) for color in range(100, 120))),
    "image of a former turn": said(
        {"role": "user", "content": [image(110), text("read")]}, {"role": "assistant", "content": "1"}, USER
    ),
}
_FAULTY: dict[str, dict[str, Any]] = {
    "temperature above": ASKED | {"temperature": 2.5},
    "negative temperature": ASKED | {"temperature": -1},
    "top_p none": ASKED | {"top_p": 0},
    "top_p above": ASKED | {"top_p": 1.5},
    "top_k negative": ASKED | {"top_k": -5},
    "min_p above": ASKED | {"min_p": 2},
    "no tokens": ASKED | {"max_tokens": 0},
    "negative length": ASKED | {"max_tokens": -1},
    "prompt and answer too long": ASKED | {"max_tokens": 10**6},
    "too many top logprobs": ASKED | {"logprobs": True, "top_logprobs": 1000},
    "top logprobs alone": ASKED | {"top_logprobs": 2},
    "negative top logprobs": ASKED | {"logprobs": True, "top_logprobs": -2},
    "presence penalty above": ASKED | {"presence_penalty": 3},
    "repetition penalty none": ASKED | {"repetition_penalty": 0},
    "bias of no token": ASKED | {"logit_bias": {"x": 1}},
    "bias above": ASKED | {"logit_bias": {str(10**9): 1}},
    "unknown format": ASKED | {"response_format": {"type": "xml"}},
    "schema without a schema": ASKED | {"response_format": {"type": "json_schema"}},
    "two structures": ASKED | {"structured_outputs": {"choice": ["1"], "regex": "1"}},
    "tool choice without tools": ASKED | {"tool_choice": "required"},
    "automatic tools": ASKED | {"tools": [TOOL], "tool_choice": "auto"},
    "unknown tool": ASKED | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    "both ends": ASKED | {"continue_final_message": True, "add_generation_prompt": True},
    "stream options without a stream": ASKED | {"stream_options": {"include_usage": True}},
    "more tokens than allowed": ASKED | {"min_tokens": 9, "max_tokens": 3},
    "no allowed tokens": ASKED | {"allowed_token_ids": []},
    "seed too large": ASKED | {"seed": 2**63},
    "streamed prompt logprobs": ASKED | {"stream": True, "prompt_logprobs": 1},
    "truncated to nothing": ASKED | {"truncate_prompt_tokens": -5},
}
_FOUND_BY_THE_GATEWAY: dict[str, dict[str, Any]] = {
    "no messages": {},
    "empty messages": {"messages": []},
    "messages of text": {"messages": "read"},
    "messages of texts": {"messages": ["read"]},
    "no role": said({"content": "a"}),
    "n as text": ASKED | {"n": "many"},
    "content of numbers": said({"role": "user", "content": 5}),
    "unknown part": parts({"type": "smell", "smell": "x"}),
    "part without a type": parts({"text": {"a": 1}}),
    "image without a URL": parts({"type": "image_url"}),
    "image that is none": parts({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
    "image of broken base64": parts({"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}),
    "image of another scheme": parts({"type": "image_url", "image_url": {"url": "gopher://x/y.png"}}),
    "image embeddings": parts({"type": "image_embeds", "image_embeds": "AAAA"}),
    "unknown model": ASKED | {"model": "other"},
    "model of a number": ASKED | {"model": 5},
    "stream as text": ASKED | {"stream": "perhaps"},
    "length as text": ASKED | {"max_tokens": "many"},
    "stop of numbers": ASKED | {"stop": [1]},
    "no priority": ASKED | {"priority": "high"},
    "bad words of numbers": ASKED | {"bad_words": [1]},
    "documents that are none": ASKED | {"documents": "text"},
    "malformed tools": ASKED | {"tools": [{"type": "function"}]},
    "too long": said({"role": "user", "content": "read the digits " * 4000}),
    "empty salt": ASKED | {"cache_salt": ""},
    "salt with a slash": ASKED | {"cache_salt": "a/b"},
    "null image without a type": parts({"image_url": NULL}),
    "text without a type": parts({"text": "read"}),
    "no content of a user": said({"role": "user", "content": NULL}),
}
_STRICTER: dict[str, dict[str, Any]] = {
    "beam search with an image": parts(picture(96)) | {"use_beam_search": True, "n": 2},
    "image of another format": parts(picture(97, "PCX")),
    "tiff of zstd": parts(picture(98, "TIFF", compression="zstd")),
    "flag as a number": ASKED | {"add_generation_prompt": 1},
}
_NOT_COMPILED: dict[str, dict[str, Any]] = {  # by Triptych's own process for grammars
    "bad regex": ASKED | {"structured_outputs": {"regex": "["}},
}

TABLE: Table = {
    **with_streams(table(PATH, _TEXTS | _IMAGES, GREEDY)),
    **table(PATH, _FAULTY, GREEDY),
    **table(PATH, _FOUND_BY_THE_GATEWAY, GREEDY, own_words=True),
    **table(PATH, _STRICTER, GREEDY, own_status=400, why="as docs/reference/endpoints.md has it"),
    **table(PATH, _NOT_COMPILED, GREEDY, own_words=True),
}
