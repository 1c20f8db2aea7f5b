"""The list of cases. Each is a function of the module named by its family."""

from __future__ import annotations

from tests.public.case import Case

NNX_JIT = "flax.nnx.jit"
FILTER_JIT = "equinox.filter_jit"

OPTAX = (
    Case("optax_steps", "adafactor", "optax", "0.2.8", "adafactor"),
    Case("optax_steps", "lion_of_clipped", "optax", "0.2.8", "lion, clipping by global norm and by unit, schedule"),
    Case(
        "optax_steps", "multi_steps", "optax", "0.2.8", "MultiSteps of adamw (a `cond` around the update)", single=True
    ),
    Case("optax_steps", "muon", "optax", "0.2.8", "contrib.muon (Newton-Schulz iterations)"),
    Case("optax_steps", "schedule_free", "optax", "0.2.8", "contrib.schedule_free_adamw"),
    Case("optax_steps", "prodigy", "optax", "0.2.8", "contrib.prodigy"),
    Case("optax_steps", "mechanized", "optax", "0.2.8", "contrib.mechanize of adam"),
    Case("optax_steps", "dadapt", "optax", "0.2.8", "contrib.dadapt_adamw"),
    Case("optax_steps", "adopt_if_finite", "optax", "0.2.8", "contrib.adopt in apply_if_finite"),
    Case("optax_steps", "sharpness_aware", "optax", "0.2.8", "contrib.sam over two calls"),
    Case("optax_steps", "lookahead", "optax", "0.2.8", "lookahead with LookaheadParams"),
    Case("optax_steps", "private", "optax", "0.2.8", "contrib.dpsgd on per-example gradients", batch=(1, 2)),
    Case("optax_steps", "lbfgs", "optax", "0.2.8", "lbfgs with zoom line search (`while` with `cond`)"),
    Case("optax_steps", "projected", "optax", "0.2.8", "projections onto simplex and l1 ball, huber loss"),
    Case("optax_steps", "ctc", "optax", "0.2.8", "ctc_loss (`scan` over time), rmsprop"),
    Case("optax_steps", "perturbed_ranking", "optax", "0.2.8", "perturbed sort, yogi", batch=(2, 3)),
    Case("optax_steps", "metric_losses", "optax", "0.2.8", "ntxent, cosine, focal, poly and ranking losses"),
    Case("optax_steps", "labelled_parts", "optax", "0.2.8", "partition, contrib.ademamix, ema of updates"),
    Case("optax_steps", "hungarian", "optax", "0.2.8", "assignment.hungarian_algorithm (nested `while`)"),
)

LINEN = (
    Case(
        "linen_steps",
        "transformer_dropout",
        "flax",
        "0.12.8",
        "attention, dropout, TrainState, lr_schedule",
        batch=(1, 2),
    ),
    Case(
        "linen_steps", "batch_norm", "flax", "0.12.8", "Conv, ConvTranspose, BatchNorm, GroupNorm, pools", batch=(1, 2)
    ),
    Case("linen_steps", "bidirectional_lstm", "flax", "0.12.8", "RNN, Bidirectional, OptimizedLSTMCell, GRUCell"),
    Case("linen_steps", "scanned_remat", "flax", "0.12.8", "nn.scan over nn.remat blocks with a policy"),
    Case("linen_steps", "weight_norms", "flax", "0.12.8", "WeightNorm, Einsum, DenseGeneral, PReLU, InstanceNorm"),
    Case("linen_steps", "spectral_norm", "flax", "0.12.8", "SpectralNorm with its statistics"),
    Case("linen_steps", "scaled_half", "flax", "0.12.8", "float16 layers with DynamicScale", single=True, batch=(1, 2)),
    Case("linen_steps", "autoregressive_decode", "flax", "0.12.8", "attention cache written in a `scan`"),
)

NNX = (
    Case(
        "nnx_steps",
        "classifier_metrics",
        "flax",
        "0.12.8",
        "Conv, BatchNorm, Dropout, Optimizer, MultiMetric",
        mutates=True,
        jit=NNX_JIT,
    ),
    Case(
        "nnx_steps",
        "lora_attention",
        "flax",
        "0.12.8",
        "MultiHeadAttention, LoRA, DiffState",
        mutates=True,
        jit=NNX_JIT,
        single=True,
    ),
    Case(
        "nnx_steps",
        "recurrent",
        "flax",
        "0.12.8",
        "RNN of LSTM and GRU cells, LinearGeneral",
        mutates=True,
        jit=NNX_JIT,
    ),
    Case("nnx_steps", "scanned_layers", "flax", "0.12.8", "nnx.vmap, nnx.scan, nnx.remat", mutates=True, jit=NNX_JIT),
    Case(
        "nnx_steps", "functional_split", "flax", "0.12.8", "nnx.split and nnx.merge in jax.value_and_grad", single=True
    ),
)

EQUINOX = (
    Case("equinox_steps", "mlp", "equinox", "0.13.8", "MLP with static leaves, filter_value_and_grad", jit=FILTER_JIT),
    Case(
        "equinox_steps",
        "convolutions",
        "equinox",
        "0.13.8",
        "Conv2d, ConvTranspose2d, GroupNorm, pools, WeightNorm",
        jit=FILTER_JIT,
    ),
    Case(
        "equinox_steps",
        "attention",
        "equinox",
        "0.13.8",
        "Embedding, RotaryPositionalEmbedding, MultiheadAttention",
        jit=FILTER_JIT,
    ),
    Case("equinox_steps", "cells", "equinox", "0.13.8", "GRUCell and LSTMCell in a vmapped `scan`", jit=FILTER_JIT),
    Case(
        "equinox_steps", "stateful_norms", "equinox", "0.13.8", "BatchNorm and SpectralNorm with State", jit=FILTER_JIT
    ),
    Case(
        "equinox_steps",
        "already_jitted",
        "equinox",
        "0.13.8",
        "filter_jit of an ensemble by filter_vmap",
        jit=FILTER_JIT,
    ),
    Case(
        "equinox_steps",
        "checkpointed_loop",
        "equinox",
        "0.13.8",
        "gradients through the checkpointed while_loop",
        jit=FILTER_JIT,
    ),
)

HAIKU = (
    Case("haiku_steps", "resnet18", "dm-haiku", "0.0.17", "ResNet with narrow channels, BatchNorm state", batch=(1, 2)),
    Case("haiku_steps", "mobilenet", "dm-haiku", "0.0.17", "MobileNetV1 (depthwise convolutions)", batch=(1, 2)),
    Case("haiku_steps", "vector_quantizer", "dm-haiku", "0.0.17", "VectorQuantizer and VectorQuantizerEMA"),
    Case(
        "haiku_steps", "unrolled_lstm", "dm-haiku", "0.0.17", "DeepRNN of LSTM and GRU, dynamic_unroll; batch on dim 1"
    ),
    Case("haiku_steps", "transformer", "dm-haiku", "0.0.17", "MultiHeadAttention, dropout, RMSNorm"),
    Case("haiku_steps", "conv_lstm_remat", "dm-haiku", "0.0.17", "Conv2DLSTM, hk.remat, separable convolution"),
    Case("haiku_steps", "layer_stack", "dm-haiku", "0.0.17", "experimental.layer_stack, SpectralNorm, moving average"),
)

NUMPYRO = (
    Case(
        "numpyro_steps",
        "auto_normal",
        "numpyro",
        "0.22.0",
        "AutoNormal, hierarchical logistic regression, four particles",
    ),
    Case("numpyro_steps", "auto_multivariate", "numpyro", "0.22.0", "AutoMultivariateNormal"),
    Case("numpyro_steps", "auto_low_rank", "numpyro", "0.22.0", "AutoLowRankMultivariateNormal, ClippedAdam"),
    Case(
        "numpyro_steps",
        "auto_delta_minimize",
        "numpyro",
        "0.22.0",
        "AutoDelta with optim.Minimize (BFGS inside the update)",
    ),
    Case("numpyro_steps", "auto_iaf", "numpyro", "0.22.0", "AutoIAFNormal"),
    Case("numpyro_steps", "auto_bnaf", "numpyro", "0.22.0", "AutoBNAFNormal"),
    Case("numpyro_steps", "enumerated_mixture", "numpyro", "0.22.0", "mixture with TraceEnum_ELBO"),
    Case("numpyro_steps", "amortized", "numpyro", "0.22.0", "VAE of stax networks, TraceMeanField_ELBO"),
    Case("numpyro_steps", "score_function", "numpyro", "0.22.0", "Poisson latents, TraceGraph_ELBO"),
    Case("numpyro_steps", "random_walk", "numpyro", "0.22.0", "contrib.control_flow.scan"),
    Case("numpyro_steps", "hmc", "numpyro", "0.22.0", "HMC.sample"),
    Case("numpyro_steps", "nuts", "numpyro", "0.22.0", "NUTS.sample (`while` over trees)"),
    Case("numpyro_steps", "chains", "numpyro", "0.22.0", "MCMC.run of eight vectorized NUTS chains"),
    Case(
        "numpyro_steps",
        "discrete_regression",
        "numpyro",
        "0.22.0",
        "zero-inflated, ordered, LKJ and truncated likelihoods",
    ),
)

DISTRAX = (
    Case(
        "distrax_steps",
        "spline_flow",
        "distrax",
        "0.1.9",
        "MaskedCoupling of RationalQuadraticSpline, haiku conditioner",
    ),
    Case(
        "distrax_steps",
        "affine_bijectors",
        "distrax",
        "0.1.9",
        "LowerUpperTriangularAffine, DiagPlusLowRankLinear, Tanh",
    ),
    Case("distrax_steps", "hidden_markov", "distrax", "0.1.9", "HMM forward_backward and viterbi"),
    Case(
        "distrax_steps",
        "policies_and_mixtures",
        "distrax",
        "0.1.9",
        "MixtureSameFamily, Quantized, Softmax, Gamma, VonMises",
    ),
)

DIFFRAX = (
    Case(
        "diffrax_steps",
        "checkpointed_adjoint",
        "diffrax",
        "0.7.2",
        "neural ODE, Tsit5, PID steps, RecursiveCheckpointAdjoint",
        jit=FILTER_JIT,
    ),
    Case("diffrax_steps", "direct_adjoint", "diffrax", "0.7.2", "neural ODE, Heun, DirectAdjoint", jit=FILTER_JIT),
    Case(
        "diffrax_steps", "backsolve_adjoint", "diffrax", "0.7.2", "neural ODE, Dopri5, BacksolveAdjoint", jit=FILTER_JIT
    ),
    Case(
        "diffrax_steps",
        "stiff",
        "diffrax",
        "0.7.2",
        "Kvaerno5: Newton and linear solves in adaptive steps",
        jit=FILTER_JIT,
    ),
    Case("diffrax_steps", "stochastic", "diffrax", "0.7.2", "neural SDE on a VirtualBrownianTree", jit=FILTER_JIT),
    Case("diffrax_steps", "controlled", "diffrax", "0.7.2", "neural CDE, CubicInterpolation", jit=FILTER_JIT),
    Case("diffrax_steps", "event", "diffrax", "0.7.2", "Event with a root found by optimistix.Newton", jit=FILTER_JIT),
)

TRANSFORMERS = (
    Case("transformers_steps", "bert", "transformers", "4.53.3", "FlaxBertForMaskedLM"),
    Case("transformers_steps", "gpt2", "transformers", "4.53.3", "FlaxGPT2LMHeadModel"),
    Case("transformers_steps", "gpt_neo", "transformers", "4.53.3", "FlaxGPTNeoForCausalLM"),
    Case("transformers_steps", "bart", "transformers", "4.53.3", "FlaxBartForConditionalGeneration"),
    Case("transformers_steps", "vit", "transformers", "4.53.3", "FlaxViTForImageClassification"),
)

SOLVERS = (
    Case("solver_steps", "jaxopt_lbfgs", "jaxopt", "0.8.5", "LBFGS.update"),
    Case("solver_steps", "jaxopt_proximal", "jaxopt", "0.8.5", "ProximalGradient.update with prox_lasso"),
    Case("solver_steps", "jaxopt_implicit", "jaxopt", "0.8.5", "GradientDescent with implicit differentiation"),
    Case("solver_steps", "levenberg_marquardt", "optimistix", "0.1.0", "LevenbergMarquardt and its implicit gradient"),
    Case("solver_steps", "root_find", "optimistix", "0.1.0", "Newton root finding and its gradient"),
    Case("solver_steps", "linear_solves", "lineax", "0.1.1", "CG, Cholesky and QR with gradients"),
    Case("solver_steps", "sinkhorn", "ott-jax", "0.6.0", "Sinkhorn on point clouds and its gradient"),
)

RESEARCH = (
    Case("research_steps", "vtrace_actor_critic", "rlax", "0.1.9", "vtrace, policy gradient, entropy", batch=(1, 2, 3)),
    Case(
        "research_steps", "distributional_q", "rlax", "0.1.9", "categorical and quantile Q learning", batch=(1, 2, 3, 4)
    ),
    Case("research_steps", "muzero_search", "mctx", "0.0.71", "gumbel_muzero_policy"),
    Case("research_steps", "graph_network", "jraph", "0.0.6.dev0", "GraphNetwork and GAT on padded graphs"),
    Case("research_steps", "blackjax_hmc", "blackjax", "1.7.1", "hmc"),
    Case("research_steps", "blackjax_nuts", "blackjax", "1.7.1", "nuts"),
    Case("research_steps", "blackjax_mala", "blackjax", "1.7.1", "mala"),
)

SCIENCE = (
    Case("science_steps", "equivariant", "e3nn-jax", "0.21.0", "tensor_product, spherical_harmonics, scatter_sum"),
    Case("science_steps", "gaussian_process", "tinygp", "0.3.1", "marginal likelihood (Cholesky)"),
    Case("science_steps", "expectation_maximization", "dynamax", "1.0.3", "GaussianHMM.e_step and m_step"),
    Case("science_steps", "evolution", "evosax", "0.3.2", "CMA_ES ask and tell (eigh)"),
    Case(
        "science_steps",
        "rollouts",
        "gymnax",
        "1.0.1",
        "CartPole rollouts in a vmapped `scan`, policy gradient",
        batch=(),
    ),
    Case("science_steps", "replay", "flashbax", "0.1.3", "item buffer: add and sample inside the step"),
    Case("science_steps", "molecular_dynamics", "jax-md", "0.2.29", "simulate.nve with soft_sphere_pair", batch=()),
)

CASES = (
    *OPTAX,
    *LINEN,
    *NNX,
    *EQUINOX,
    *HAIKU,
    *NUMPYRO,
    *DISTRAX,
    *DIFFRAX,
    *TRANSFORMERS,
    *SOLVERS,
    *RESEARCH,
    *SCIENCE,
)
