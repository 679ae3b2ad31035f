"""Object stores: data sets behind URLs, ranges read ahead, caches on local disks, and preparation there."""
