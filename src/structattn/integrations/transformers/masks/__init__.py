"""What transformers' masks become: a description of which tokens a query sees, made once for all layers of a
call.
"""
