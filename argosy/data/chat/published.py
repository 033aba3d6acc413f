"""Published chat formats by name, for tokenizers that come without a chat template: `data.template=chatml`.

Each template writes plain conversations, without tools. Only `chatml` and `llama3` accept any role.

    chatml    OpenAI, github.com/openai/openai-python/blob/release-v0.28.0/chatml.md; as Qwen, without its default system message
    gemma     ai.google.dev/gemma/docs/core/prompt-structure; no system message, and turns alternate
    llama3    llama.com/docs/model-cards-and-prompt-formats/meta-llama-3
    mistral   docs.mistral.ai/guides/tokenization, version 3; the system message stands in the first user message
    zephyr    huggingface.co/HuggingFaceH4/zephyr-7b-beta; turns end with the tokenizer's own end of sequence

`zephyr` needs no special token but end-of-sequence, at which a model without chat data already stops. For a tokenizer that lacks the
special tokens of the other templates, these are ordinary text.
"""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='', turns=0) %}{% for message in messages %}"
    "{% if message['role'] == 'system' and loop.first %}{% set ns.system = message['content'] + '\n\n' %}"
    "{% elif (message['role'] == 'user') != (ns.turns % 2 == 0) or message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('After an optional system message, roles must alternate user/assistant/user/assistant/...') }}"
    "{% else %}{% set ns.turns = ns.turns + 1 %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + ns.system + message['content'] + '[/INST]' }}{% set ns.system = '' %}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endif %}{% endfor %}"
)

ZEPHYR = (
    "{% for message in messages %}{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('Only the roles system, user and assistant are supported') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

PUBLISHED = {"chatml": CHATML, "gemma": GEMMA, "llama3": LLAMA3, "mistral": MISTRAL, "zephyr": ZEPHYR}
