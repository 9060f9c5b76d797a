"""Images: from what a client sent to what an engine computes.

1. `media.MediaLoader.load(reference)` -> a PIL image, RGB, turned as it says, of bounded size.
2. `processors.table.create_image_processor(source, options, tokenizer)` -> the `ImageProcessor` of
   a model; None where it reads no images or is loaded to read none. `process(image)` -> an
   `ImageItem`: pixels as the encoder takes them, and the tokens that the image is in a prompt. It
   calls no model, and may be called in any thread. Videos likewise: `load_video`,
   `create_video_processor`.
3. `items.expand(token_ids, items, processor.placeholder_id)` -> the prompt's tokens with each
   placeholder replaced, and the `ImageInput`s that go into `EngineRequest.images`. A prompt is
   tokenised with one placeholder for each image, as chat templates write it
   (`processor.placeholder` is its text).
4. The engine encodes an image when a step computes its positions.

A server does steps 2 and 3 beside its event loop, and passes both results on:
`AsyncEngine.generate(request_id, token_ids, params, images=inputs)`; its processors are
`AsyncEngine.image_processor` and `video_processor`. `LLMEngine.add_request(..., images=...)` takes
PIL images and does them itself.
"""
