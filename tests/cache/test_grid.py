import pytest

from omlx.cache.grid import PrefillGrid


@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 256])
def test_edges_are_a_function_of_position_and_include_every_block_boundary(block_size):
    grid = PrefillGrid(block_size)
    edges = [0]
    while edges[-1] < 4096:
        edges.append(grid.next_edge(edges[-1]))
    assert set(range(0, 4096, block_size)) <= set(edges)
    for position in range(4096):
        floor = grid.floor(position)
        assert floor in edges and floor <= position < grid.next_edge(position)
        assert grid.next_edge(position) == edges[edges.index(floor) + 1]


def test_cells_shrink_as_the_context_grows():
    grid = PrefillGrid(64)
    assert [grid.cell(p) for p in (0, 63, 64, 511, 512, 2047, 2048, 100_000)] == [64, 64, 32, 32, 16, 16, 8, 8]


@pytest.mark.parametrize("block_size", [0, 4, 12, 63, -8])
def test_a_block_size_that_fits_no_grid_is_refused(block_size):
    with pytest.raises(ValueError, match=str(block_size)):
        PrefillGrid(block_size)


def test_grids_that_cut_differently_have_different_names():
    assert str(PrefillGrid(64)) == str(PrefillGrid(256)) != str(PrefillGrid(16))
