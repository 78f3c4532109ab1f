"""Joint search: how wide each group and how many bits each layer, chosen together under a cost."""
