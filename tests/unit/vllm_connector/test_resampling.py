"""Sounds of another rate than the model's, in an environment whose torchaudio cannot be loaded."""

import numpy as np
import pytest

from triptych_vllm_connector import plugin


def test_sounds_are_resampled_without_torchaudio(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal import audio
    from vllm.utils.import_utils import PlaceholderModule

    monkeypatch.setattr(audio, "torchaudio", PlaceholderModule("torchaudio"))
    monkeypatch.setattr(audio, "resample_audio_torchaudio", audio.resample_audio_torchaudio)
    plugin._resample_without_torchaudio()
    at_s = np.arange(800) / 8_000
    resampled = audio.AudioResampler(16_000).resample(np.sin(2 * np.pi * 440 * at_s), orig_sr=8_000)
    expected = np.sin(2 * np.pi * 440 * np.arange(1_600) / 16_000)
    assert resampled.shape == expected.shape
    assert np.abs(resampled - expected)[200:-200].max() < 0.01


def test_vllms_own_way_stays_where_torchaudio_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal import audio

    own = audio.resample_audio_torchaudio
    monkeypatch.setattr(audio, "torchaudio", object())
    monkeypatch.setattr(audio, "resample_audio_torchaudio", own)
    plugin._resample_without_torchaudio()
    assert audio.resample_audio_torchaudio is own
