"""The APIs of models that embed or score: OpenAI's embeddings, vLLM's scores, Jina's and Cohere's
ranking.
"""
