"""Features of training that the core finds at a seam, and imports when a model first needs them: a file or folder each.

A plug-in may take what it needs from any wing of the core. The core names it at its seam alone, inside a function or
for annotations: a step of a plain model loads none.
"""
