"""Send an image to Triptych and print the answer as it streams.

python examples/chat.py PICTURE [QUESTION] [--base-url URL] [--api-key KEY]
"""

import argparse
import base64
import mimetypes
import sys
from pathlib import Path

from openai import APIConnectionError, APIError, OpenAI


def data_url(picture: Path) -> str:
    """The picture as a `data:` URL. A public `https:` URL would do as well."""
    kind = mimetypes.guess_type(picture.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask about a picture.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("question", nargs="?", default="read the digits")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()

    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    try:
        model = client.models.list().data[0].id
        answer = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data_url(options.picture)}},
                        {"type": "text", "text": options.question},
                    ],
                }
            ],
            stream=True,
            temperature=0,
            max_tokens=64,
        )
        for chunk in answer.parse():
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
    except APIConnectionError:
        sys.exit(f"nothing answers at {options.base_url}; start it with ./triptych up")
    except (APIError, OSError, IndexError) as error:
        sys.exit(f"failed: {error}")
    print(f"\n\nwhere the time went: ./triptych trace {answer.headers['x-request-id']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
