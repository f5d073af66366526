"""Attention variants of other papers that are no scoring and layout, as specs that every model here takes:
see the entry points of this package.
"""
