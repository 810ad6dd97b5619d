#!/usr/bin/env bash
# latex2sympy2-extended 1.11.0, and math-verify 0.9.0 on top of it, read \% or not depending on the version of ANTLR that
# happens to be installed. The package has a parser for each of several versions of antlr4-python3-runtime; the one for
# 4.9.3 was generated from an older grammar. Hydra and OmegaConf pin 4.9.3, so beside them \boxed{50\%} is not equal to
# 0.5, and \boxed{0.5\%} is, without a word. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
install() { "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"; }
install math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
for version in 4.9.3 4.13.2; do
    install antlr4-python3-runtime==$version
    "$folder/venv/bin/python" - $version <<'PYTHON'
import sys
from math_verify import parse, verify

found = {reference: [verify(parse(f"${reference}$"), parse(f"\\boxed{{{said}}}")) for said in (r"50\%", r"0.5\%")]
         for reference in ("0.5", r"0.5\%")}
print("ANTLR", sys.argv[1], found)
old = {"0.5": [False, False], r"0.5\%": [False, True]}
new = {"0.5": [True, False], r"0.5\%": [False, True]}
wrong = verify(parse(r"$0.5\%$"), parse(r"\boxed{0.5}"))
print(r"reference 0.5\%, completion \boxed{0.5}:", wrong)
is_old = sys.argv[1] == "4.9.3"
sys.exit(0 if found == (old if is_old else new) and wrong == is_old else 1)
PYTHON
done
# Seen: ANTLR 4.9.3 {'0.5': [False, False], '0.5\\%': [False, True]}, then True;
#       ANTLR 4.13.2 {'0.5': [True, False], '0.5\\%': [False, True]}, then False
