"""What `test_every_transformers_model.py` finds of each type of causal language model of a version
of transformers: a small one is equal by its modelling code, or refused.
"""

from __future__ import annotations

VERSION = "5.24.0"
_TYPES = {
    "equal": """
afmoe apertus apertus1p5_text arcee aria_text axk1 beam bitnet codegen cohere cohere2
cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe
exaone exaone4 exaone_moe flex_olmo gemma gemma3_text gemma4_text gemma4_unified_text glm glm4
glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared helium
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna
llama longcat_flash mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
mixtral modernbert-decoder moshi nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla seed_oss smollm3 solar_open
starcoder2 youtu
    """,
    "refused": """
axk2 bailing_hybrid bamba bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot
blenderbot-small bloom blt camembert cpmant data2vec-text deepseek_v32 deepseek_v4
diffllama doge dory dots3_note dots3_note_text electra emu3 ernie falcon falcon_h1 falcon_mamba
flint fuyu gemma2 gemma3 gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_unified
gemma4_unified_assistant git glm4_moe_lite glm_moe_dsa got_ocr2 gpt_neo gpt_neox_japanese
gpt_oss granite_swa granitemoe_swa granitemoehybrid hrm_text hy_v4 inkling2_loop_text
inkling2_text inkling_text jamba jetmoe kimi_linear lara_mini lfm2 lfm2_moe lfm3 llama4
llama4_text mamba mamba2 marian mbart megatron-bert mimo_v2_flash minimax mllama
moss_transcribe_diarize mpt musicgen musicgen_melody mvp nemotron nemotron_h olmo_hybrid
openai-gpt pegasus plbart prophetnet qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert roberta
roberta-prelayernorm roc_bert roformer rwkv sarvam_moe stablelm trocr vaultgemma whisper xglm
xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod zamba zamba2 zaya
    """,
}
OUTCOMES: dict[str, str] = {
    name: outcome for outcome, names in _TYPES.items() for name in names.split()
}
