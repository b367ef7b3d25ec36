"""The package that `headrace domain new` writes, as working code under the name `my_domain`."""
