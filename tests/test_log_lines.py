"""Log lines: whatever a value is, one line of key=value pairs."""

from uirl_jax.log_lines import key_values


def test_key_values_hostile_text_stays_on_its_line() -> None:
    line = key_values("note", path="a/b.tfrecord", n=3, x=0.123456, text='x"\n\x1b[31m y=\u202e')
    assert line == ('event=note path=a/b.tfrecord n=3 x=0.1235 text="x\\"\\n\\u001b[31m y=\\u202e"')
    assert line.isprintable()
