"""The modes in which a group's forward computes, one file each, behind one seam: ``mode``."""
