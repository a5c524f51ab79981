"""An image on the terminal."""

from pathlib import Path

from PIL import Image
from rich.console import Console

from triptych_cli.commands.demo import half_blocks


def test_a_picture_becomes_half_as_many_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.png"
    Image.new("RGB", (168, 56), (255, 0, 0)).save(file)
    text = half_blocks(file, height=16)
    lines = text.plain.splitlines()
    assert len(lines) == 8
    assert {len(line) for line in lines} == {48}
    console = Console(force_terminal=True, color_system="truecolor", width=80, record=True)
    with console.capture() as capture:
        console.print(text)
    assert "255;0;0" in capture.get()
