"""Differences between the supported versions of vLLM, and how parts of it are replaced.

vllm_0_32, vllm_0_33  the same names, each for its version
current               the one for the installed vLLM, chosen at import
replacing             replaces a part of vLLM, and checks that vLLM uses the replacement

The rest of the code holds for every supported version; `docs/design/vllm-versions.md` lists each seam.
"""
