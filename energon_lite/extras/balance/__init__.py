"""Even work for the ranks of a step: cost models, balanced steps, columns of images, shared encoders, measured runs."""

from energon_lite.entry_points import ColumnOption, Columns, Command
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

_GROUP = "Costs"

COMMANDS = {
    "profile": Command(
        "energon_lite.extras.balance.profile_command:command",
        "Find the largest capacity with which a training step fits into memory.",
        _GROUP,
    ),
}
COLUMNS = {
    "images": Columns(
        "energon_lite.extras.balance.image_columns:requested",
        ("images", "image_sizes", "image_patches", "patches", "squared_patches"),
        {
            "images": ColumnOption("Add the columns images and image_sizes: number of images, heights and widths."),
            "patches": ColumnOption(
                'Rule for the patches of an image: \'{"patch_size": 14, "multiple": 28}\' (also image_size, '
                "min_pixels, max_pixels). Adds patches, squared_patches, image_patches, and the columns of --images.",
                "JSON",
            ),
        },
    ),
}
COST_MODELS = {"transformer": "energon_lite.extras.balance.cost_fit:cost_model"}
