"""Static comparison of what this project uses of vLLM with the source of any version of it.

source   Python source of a published version, from the package index; the installed one
symbols  definitions in a source tree: modules, classes, attributes, signatures, types as far as written down
uses     what our code imports, calls, overrides, replaces and reads

`python -m tests.support.vllm_seams` compares uses with definitions, and prints functions whose body differs.
"""
