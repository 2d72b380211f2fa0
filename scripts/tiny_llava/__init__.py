"""The training of models/tiny-llava: scenes, conversations, model, optimizer, stages, evaluation."""
