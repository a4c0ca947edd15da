"""An allocation for each tensor of a model's configuration, with each layer's view of it as its backend wants it."""

import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.axes import AxesOf, layer_views
from kvtier.kvcache.layout.canonical import LayerCache
from kvtier.kvcache.layout.model import KVCacheConfig


def allocate_tensors(config: KVCacheConfig, axes: AxesOf, device: torch.device | str = "cpu") -> dict[str, LayerCache]:
    """Allocate the caches, zero at first: layers that share a tensor get views of the same bytes.

    Pages lie `page_bytes` apart; kernel blocks, where a block is several, at equal distances, so a padded page cannot
    be split, and the axes around blocks leave no room for padding: `ConfigError`.
    """
    layers = dict[str, LayerCache]()
    group_of = config.group_of
    for tensor in config.tensors:
        memory = torch.zeros(tensor.size_bytes, dtype=torch.int8, device=device)
        for layer in tensor.shared_by:
            group = group_of[layer]
            spec, of_layer = group.spec_of(layer), axes.get(layer)
            padded = spec.page_bytes > spec.unpadded_page_bytes
            if padded and group.kernel_blocks > 1:
                raise ConfigError(f"{layer}: a padded page cannot be split into {group.kernel_blocks} kernel blocks")
            if padded and of_layer is not None and of_layer.outside_blocks:
                raise ConfigError(f"{layer}: pages with axes {of_layer.outside_blocks} around blocks cannot be padded")
            around = of_layer is not None and of_layer.outside_blocks
            layers[layer] = layer_views(
                memory,
                layer,
                spec,
                of_layer,
                config.num_blocks,
                kernel_blocks=group.kernel_blocks,
                block_stride_bytes=None if around else spec.page_bytes // group.kernel_blocks,
            )
    return layers
