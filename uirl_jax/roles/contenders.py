"""The policies that `--role=eval --checkpoint=...` names, several in one command.

    base              the config's model, with model.adapter
    policy            the newest published one; the default
    120               the checkpoint of step 120
    runs/x/best/...   an adapter in PEFT's format, or a model directory
    http://HOST/v1    a server that speaks OpenAI's protocol, serving engine.openai.model
"""
