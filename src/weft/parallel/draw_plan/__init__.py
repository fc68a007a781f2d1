"""Pictures of a Plan: which slice of each weight a rank holds, and where tensors are exchanged at a
module's edge."""
