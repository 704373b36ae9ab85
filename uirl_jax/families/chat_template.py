"""Jinja chat templates of exported models: a system prompt for chats that bring none."""

import json

# Where a family's template may say the block, and the block the prompt.
SYSTEM_BLOCK, SYSTEM_PROMPT = "@SYSTEM_BLOCK@", "@SYSTEM_PROMPT@"


def with_system_prompt(template: str, block: str, system_prompt: str) -> str:
    """The template for transformers.

    Args:
      template: with SYSTEM_BLOCK where the block belongs.
      block: with SYSTEM_PROMPT where the prompt belongs, as a Jinja expression.
      system_prompt: of a chat without one; empty: no block.
    """
    literal = json.dumps(system_prompt, ensure_ascii=False)  # Jinja's string literals read the same
    filled = block.replace(SYSTEM_PROMPT, literal) if system_prompt else ""
    return template.replace(SYSTEM_BLOCK, filled)
