"""An instance that cannot even be addressed is one that cannot be reached: another one is taken."""

import pytest

from triptych_gateway.chat.upstream import UnreachableError, new_client, open_answer


@pytest.mark.parametrize(
    "url",
    [
        "http://::1:8100",
        "http://[::1",
        "http://h:abc",
        "http://xn--/",
        "http://\x00",
        "nonsense",
        "ftp://h",
        "",
    ],
)
async def test_a_url_that_is_none_means_unreachable(url: str) -> None:
    async with new_client(1.0, 1.0) as client:
        with pytest.raises(UnreachableError):
            async with open_answer(client, url, b"{}", {}, stream=False):
                pass
