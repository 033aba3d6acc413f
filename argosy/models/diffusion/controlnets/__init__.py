"""ControlNets: networks beside a denoiser that read a control image, and whose outputs are added to the denoiser's layers. One file for
each kind of denoiser."""
