"""Short chat templates in the manner of well-known families: for tests of what is learned about a template."""

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Reasoning is kept after the last user message only; the generation prompt opens the block.
CHATML_DROPS = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{%- endif %}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else m.content %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.query %}{{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is false %}{{- '\n</think>\n\n' }}{%- endif %}{%- endif %}"""

# The model opens its block itself; empty reasoning is not rendered; with thinking off the block is closed in advance.
QWEN3 = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.query and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}
{{- m.content.lstrip('\n') }}
{%- for call in m.tool_calls or [] %}{%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""

LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA = r"""{{- '<|begin_of_text|>' }}
{%- macro turn(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- endmacro %}
{%- if messages[0].role == 'system' or tools %}{{- turn('system') }}
{%- if tools %}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{%- endif %}
{{- (messages[0].content | trim if messages[0].role == 'system' else '') + '<|eot_id|>' }}{%- endif %}
{%- for m in messages if m.role != 'system' %}
{%- if m.tool_calls %}{{- turn('assistant') + '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{- turn('ipython') + m.content + '<|eot_id|>' }}
{%- else %}{{- turn(m.role) + m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- turn('assistant') }}{%- endif %}"""

MISTRAL_SPECIAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
MISTRAL_SPECIAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
# No system turn of its own, strict alternation, no generation prompt, ids of nine characters.
MISTRAL = r"""{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if system else messages %}
{%- set state = namespace(user=true, last=0) %}
{%- for m in rest %}{%- if m.role == 'user' %}{%- set state.last = loop.index0 %}{%- endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != state.user %}{{- raise_exception('Roles must alternate.') }}{%- endif %}
{%- set state.user = not state.user %}{%- endif %}{%- endfor %}
{{- '<s>' }}{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == state.last %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + (system + '\n\n' if system and loop.first else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('Ids must have nine characters.') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + '</s>' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]{"content": "' + m.content + '"}[/TOOL_RESULTS]' }}{%- endif %}
{%- endfor %}"""

GEMMA_SPECIAL = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
# Refuses a system turn, strict alternation, no tools.
GEMMA = r"""{{- '<bos>' }}
{%- if messages[0].role == 'system' %}{{- raise_exception('There is no system role.') }}{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Roles must alternate.') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

GLM_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
GLM_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# No end token in the history: an answer ends where the next opener stands.
GLM = r"""{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\n# Tools' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- '<|system|>\n' + m.content }}
{%- elif m.role == 'user' %}{{- '<|user|>\n' + m.content + ('/nothink' if enable_thinking is false else '') }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>' }}
{%- if loop.index0 > last.query and m.reasoning_content %}{{- '\n<think>' + m.reasoning_content | trim + '</think>' }}
{%- else %}{{- '\n<think></think>' }}{%- endif %}
{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor %}{{- '\n</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is false %}{{- '\n<think></think>' }}{%- endif %}{%- endif %}"""

DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
# Drops everything before </think> from the history, whatever it is told.
DEEPSEEK = r"""{{- '<｜begin▁of▁sentence｜>' }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}{%- set content = m.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"""

HARMONY_SPECIAL = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
# Turns end with another token in the history (<|end|>) than in the answer (<|return|>).
HARMONY = r"""{{- '<|start|>system<|message|>You are a model. Today is ' + strftime_now('%Y-%m-%d') + '.<|end|>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- '<|start|>developer<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

PLAIN = r"""{%- for m in messages %}{{- m.role | capitalize + ': ' + m.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"""
