"""Models of transformers' last release with Flax, in tiny configurations and with random weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import transformers
from flax.training import train_state

from tests.public.data import integers, normal

TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}


def trained(model, loss_of):
    """A train step as in the package's own scripts: `TrainState`, dropout, a loss on the logits.

    Args:
        model: a Flax model.
        loss_of: ``(apply, batch) -> loss`` where apply takes the model's own keyword arguments.
    """
    state = train_state.TrainState.create(
        apply_fn=model.__call__,
        params=model.params,
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    )

    def step(both, batch):
        state, key = both
        key, now = jax.random.split(key)

        def loss(params):
            return loss_of(lambda **inputs: state.apply_fn(**inputs, params=params, dropout_rng=now, train=True), batch)

        value, grads = jax.value_and_grad(loss)(state.params)
        return (state.apply_gradients(grads=grads), key), {"loss": value, "norm": optax.global_norm(grads)}

    return step, (state, jax.random.PRNGKey(1))


def next_token(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def bert():
    model = transformers.FlaxBertForMaskedLM(
        transformers.BertConfig(**TEXT, max_position_embeddings=8), input_shape=(1, 8), dtype=jnp.result_type(float)
    )

    def loss(apply, batch):
        logits = apply(input_ids=batch["tokens"], attention_mask=batch["mask"]).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    step, state = trained(model, loss)
    mask = (integers(5, 8, 8, seed=2) > 0).astype(jnp.int32)
    return step, (state, {"tokens": integers(32, 8, 8), "labels": integers(32, 8, 8, seed=1), "mask": mask})


def gpt2():
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(1, 8), dtype=jnp.result_type(float))

    def loss(apply, tokens):
        return next_token(apply(input_ids=tokens).logits, tokens)

    step, state = trained(model, loss)
    return step, (state, integers(32, 8, 8))


def gpt_neo():
    """Global and local attention."""
    config = transformers.GPTNeoConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        vocab_size=32,
        max_position_embeddings=8,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    )
    model = transformers.FlaxGPTNeoForCausalLM(config, input_shape=(1, 8), dtype=jnp.result_type(float))

    def loss(apply, tokens):
        return next_token(apply(input_ids=tokens).logits, tokens)

    step, state = trained(model, loss)
    return step, (state, integers(32, 8, 8))


def bart():
    config = transformers.BartConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=8,
    )
    model = transformers.FlaxBartForConditionalGeneration(config, input_shape=(1, 8), dtype=jnp.result_type(float))

    def loss(apply, batch):
        tokens, labels = batch
        shifted = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)))
        logits = apply(input_ids=tokens, decoder_input_ids=shifted).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step, state = trained(model, loss)
    return step, (state, (integers(32, 8, 8), integers(32, 8, 4, seed=1)))


def vit():
    sizes = {k: v for k, v in TEXT.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=4)
    model = transformers.FlaxViTForImageClassification(config, dtype=jnp.result_type(float))

    def loss(apply, batch):
        images, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(apply(pixel_values=images).logits, labels).mean()

    step, state = trained(model, loss)
    return step, (state, (normal(8, 3, 8, 8), integers(4, 8)))
