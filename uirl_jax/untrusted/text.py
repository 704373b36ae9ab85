"""Text from outside that a model reads: keeps what languages need, removes what has side effects.

Control characters move a terminal's cursor, direction overrides show another text than the one that
is read, and tag characters are invisible. Joiners, marks and spaces belong to languages: Persian
and Hindi need U+200C, many emoji U+200D, French U+00A0.
"""

import re
import unicodedata

_LINE_BREAKS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# Invisible characters (category Cf) that languages and emoji need: soft hyphen, ZWNJ, ZWJ, the
# marks of direction, word joiner, BOM as a space of width 0, Arabic number signs and the like.
_KEPT = frozenset("\u00ad\u200b\u200c\u200d\u200e\u200f\u061c\u2060\ufeff\u06dd\u070f\u08e2")
_KEPT_RANGE = range(0x0600, 0x0606)
# A flag of a region: a black flag, letters as tags, the closing tag.
_FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e007a]{1,8}\U000e007f")
_REMOVED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})


def readable(text: str) -> str:
    """The text without the characters that act; line breaks become newlines, tabs are kept."""
    text = _LINE_BREAKS.sub("\n", text)
    pieces, end = [], 0
    for flag in _FLAG.finditer(text):
        pieces += [*filter(_is_kept, text[end : flag.start()]), flag.group()]
        end = flag.end()
    return "".join([*pieces, *filter(_is_kept, text[end:])])


def _is_kept(char: str) -> bool:
    if char in "\n\t" or char in _KEPT or ord(char) in _KEPT_RANGE:
        return True
    return unicodedata.category(char) not in _REMOVED
