from .attention_interface import (
    EagerAttention as EagerAttention,
    attends_eagerly as attends_eagerly,
    attention_kind as attention_kind,
    calls_interface as calls_interface,
)
from .attention_masks import (
    AttentionPattern as AttentionPattern,
    causal_mask as causal_mask,
    check_padding as check_padding,
    documents_of as documents_of,
    window_rule as window_rule,
)
from .batch_labels import IGNORED as IGNORED, check_labels as check_labels
from .batchnorm import (
    BatchNorm as BatchNorm,
    batch_sums as batch_sums,
)
from .block_lists import block_lists as block_lists, callable_blocks as callable_blocks
from .chain_parts import (
    local_attributes as local_attributes,
    set_attribute as set_attribute,
    unknown_forward as unknown_forward,
)
from .conditional_calls import (
    called_by_data as called_by_data,
    chosen_modules as chosen_modules,
    class_tree as class_tree,
)
from .config_values import config_value as config_value
from .deferred_logits import (
    FEW_LOGITS as FEW_LOGITS,
    FEWEST_ROWS as FEWEST_ROWS,
    GPU_CHUNK as GPU_CHUNK,
    MOST_CHUNKS as MOST_CHUNKS,
    DeferredLogits as DeferredLogits,
    DeferringHeads as DeferringHeads,
    computed as computed,
)
from .deferred_weights import (
    deferred_init as deferred_init,
    forget_initial_weights as forget_initial_weights,
    initial_weights as initial_weights,
)
from .dropout_rng import (
    DROPOUTS as DROPOUTS,
    DROPOUTS_OF_CHANNELS as DROPOUTS_OF_CHANNELS,
    DrawPosition as DrawPosition,
    Randomness as Randomness,
    mix_key as mix_key,
    place_of as place_of,
)
from .expert_roles import (
    find_experts as find_experts,
    why_none_of as why_none_of,
)
from .freeze import freeze as freeze
from .hf_adapter import (
    ADAPTER_WEIGHTS as ADAPTER_WEIGHTS,
    Adapter as Adapter,
    adapter_files as adapter_files,
    adapter_state as adapter_state,
    add_adapter as add_adapter,
    merged_sources as merged_sources,
    merged_weight as merged_weight,
    save_adapter_settings as save_adapter_settings,
    split_adapter_tensors as split_adapter_tensors,
)
from .hf_cache import copy_cache as copy_cache, is_cache as is_cache
from .hf_model import (
    build_hf_model as build_hf_model,
    hf_weight_files as hf_weight_files,
    set_use_cache as set_use_cache,
)
from .local_multihead_attention import LocalMultiheadAttention as LocalMultiheadAttention
from .loss_form import check_loss as check_loss
from .losses import (
    Loss as Loss,
    accepts_sharded_logits as accepts_sharded_logits,
    causal_lm as causal_lm,
    check_learns as check_learns,
    classification as classification,
    cross_entropy as cross_entropy,
    cross_entropy_by as cross_entropy_by,
    is_positionwise as is_positionwise,
    is_whole_batch as is_whole_batch,
    logits_of as logits_of,
    mse as mse,
    next_token as next_token,
    positionwise as positionwise,
    reduced_numels as reduced_numels,
    split_loss as split_loss,
    vocab_parallel as vocab_parallel,
    weighed_loss as weighed_loss,
    whole_batch as whole_batch,
    widened as widened,
)
from .low_rank_factors import low_rank_factors as low_rank_factors
from .models import convnet as convnet, decoder as decoder
from .models.moe import Experts as Experts, Gate as Gate, Mixture as Mixture
from .module_calls import module_calls as module_calls
from .module_roles import find_roles as find_roles
from .moe_routing import (
    AddLoss as AddLoss,
    GateBias as GateBias,
    balance_loss as balance_loss,
    count_choices as count_choices,
    expert_shares as expert_shares,
    rebalance_gates as rebalance_gates,
    routing_arguments as routing_arguments,
    with_loss as with_loss,
    within_capacity as within_capacity,
    z_loss as z_loss,
)
from .override_needs import may_drop as may_drop, may_route as may_route
from .plain_linears import is_plain_linear as is_plain_linear
from .position_ids import PositionNumbers as PositionNumbers, sequence_length as sequence_length
from .quantized_linears import Int8Linear as Int8Linear, quantize_frozen as quantize_frozen
from .random_draws import (
    DRAWS as DRAWS,
    DRAWS_INSIDE as DRAWS_INSIDE,
    Draws as Draws,
)
from .repeated_draws import (
    RepeatedDraws as RepeatedDraws,
    place_kept as place_kept,
    rerun_of_model as rerun_of_model,
)
from .rms_norms import ShardedRMSNorm as ShardedRMSNorm, rms_rule as rms_rule
from .role_types import (
    NO_ROW as NO_ROW,
    OF_OUTPUTS as OF_OUTPUTS,
    Chain as Chain,
    ExpertsRole as ExpertsRole,
    LoneLinear as LoneLinear,
    Roles as Roles,
    chain_module as chain_module,
    is_conv1d as is_conv1d,
    is_linear as is_linear,
    linear_features as linear_features,
)
from .sequence_mixers import WHOLE_SEQUENCE as WHOLE_SEQUENCE
from .signature import (
    check_entries as check_entries,
    check_inputs as check_inputs,
    model_arguments as model_arguments,
    named_inputs as named_inputs,
)
from .size_attributes import numbers_read as numbers_read
from .weight_files import file_tensors as file_tensors
