"""What a data set may make a reader do: open files of its own folder, and decode media of bounded size."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

# what decodes pixels alone: Pillow would also start a program for a file that says it is PostScript
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF", "PPM")


@dataclass(frozen=True)
class Bounds:
    """max_image_pixels: of a picture, or of one frame. max_clip_frames: that a file of a clip may hold.
    max_clip_pixels: of all frames of a clip that are seen, or lie in an array. outside: whether names may lead out of
    the data set's folder."""

    max_image_pixels: int = 89_478_485  # as Pillow, which warns from there on
    max_clip_frames: int = 1 << 20  # nine hours at 30 a second
    max_clip_pixels: int = 1 << 31  # 6 GiB of uint8 RGB
    outside: bool = False

    def path(self, folder, name):
        """The path of a name in a data set; ValueError where it leads out of `folder`, by a link too."""
        path = Path(folder, name)
        if not self.outside and not path.resolve().is_relative_to(Path(folder).resolve()):
            raise ValueError(
                f"{name} is outside of {folder}: a data set names files of its own folder unless"
                " dataset.allow_paths_outside is true"
            )
        return path

    def picture(self, source):
        """An open picture, its header alone read: a path or a file. ValueError where it is too large."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(source, formats=FORMATS)
        try:
            self.check_size(image.height, image.width)
        except ValueError:
            image.close()
            raise
        return image

    def check_size(self, height, width):
        if height * width > self.max_image_pixels:
            raise ValueError(
                f"{width} x {height} pixels are more than dataset.max_image_pixels={self.max_image_pixels}"
            )

    def check_frames(self, frames):
        if frames > self.max_clip_frames:
            raise ValueError(f"{frames} frames are more than dataset.max_clip_frames={self.max_clip_frames}")

    def check_clip(self, frames, height, width):
        if frames * height * width > self.max_clip_pixels:
            raise ValueError(
                f"{frames} frames of {width} x {height} pixels are more than"
                f" dataset.max_clip_pixels={self.max_clip_pixels}"
            )


DEFAULT = Bounds()
