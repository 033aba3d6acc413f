"""ControlNets: networks that read a control image and steer a denoiser, whose layers add their outputs. One file for each kind of
denoiser."""
