"""Operations on a sharded model outside forward and backward."""
